"""Regressions, each made for real through what runs, and caught by the gate with a message that says it."""

import gc
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

import ddpopt.dynamo.backend
from ddpopt.errors import UnsupportedError
from ddpopt.gate import ratios
from ddpopt.gate.bands import Bands, settled
from ddpopt.gate.changes import changes
from ddpopt.gate.collected import collected
from ddpopt.gate.comparison import Comparison
from ddpopt.gate.figures import Figures
from ddpopt.gate.measuring import Measured, Settings, assembled, measure_case, time_case
from ddpopt.gate.plans import plan_figures
from ddpopt.gate.text import gate_text
from ddpopt.judge.trials import quickly
from ddpopt.ranks.group import joined
from tests.unit.gate_models import KNOBS, LAYER_MB, stack
from tests.unit.verdicts import folded

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "alone")
STACK = "tests.unit.gate_models:stack"
INLINE = Settings(targets=(STACK,), modes=("ddpopt-inline",), nproc=1)
SPLIT = Settings(targets=(STACK,), modes=("ddpopt-split",), nproc=1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process, for all tests of this file."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=0, world_size=1)
    with quickly():
        yield
    gc.unfreeze()
    dist.destroy_process_group()


def measured(settings: Settings, backend: Any = "aot_eager", before: Figures | None = None) -> Measured:
    ratios_before = (before or Figures()).ratios
    with joined() as ranks:
        found = [measure_case(name, settings, backend, ranks) for name in settings.named]
        timed = [
            time_case(name, settings, backend, ranks, ratios_before.get(name, {}), Bands())
            for name in settings.timed
        ]
        return assembled(found, timed, settings.collected)


@pytest.fixture(scope="module")
def inline(alone: None) -> Figures:
    found = measured(INLINE)
    assert found.problems == ()
    return found.figures


def told(before: Figures, found: Measured, *, figures: bool = True) -> str:
    """What the gate says, without what differs between releases of torch, and between machines."""
    comparison = Comparison("baseline.json", "torch N", found.figures, changes(before, found, Bands()))
    assert comparison.exit_code == 1
    assert not comparison
    text = re.sub(r"\b[0-9a-f]{16}\b", "FINGERPRINT", gate_text(comparison).replace(STACK, "stack"))
    text = text.partition("\n\nIf that is meant")[0]
    return folded(text if figures else re.sub(r"\d\d*\.\d{3}", "N.NNN", text))


def test_the_same_program_moves_nothing(inline: Figures) -> None:
    again = measured(INLINE)
    assert changes(inline, again, Bands()) == ()
    assert settled(inline, again.figures, Bands()) == inline


def test_a_bucket_that_moved(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOBS, "ddp_kwargs", {"bucket_cap_mb": 4 * LAYER_MB})
    case = replace(inline.cases[STACK], plan=plan_figures(stack()))
    assert_expected_inline(
        told(inline, Measured(Figures({STACK: case}))),
        """\
MOVED: 3 changes; 1 case against baseline.json (torch N)

stack, plan
  fingerprint: FINGERPRINT before, FINGERPRINT now
  bucket 0: 0.012 MiB float32 before, 0.016 MiB float32, with layers.1.weight
    now
  bucket 1: 0.008 MiB float32, with layers.1.weight before, 0.004 MiB float32
    now""",
    )


def test_one_bucket_more(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOBS, "ddp_kwargs", {"bucket_cap_mb": 2 * LAYER_MB})
    assert_expected_inline(
        told(inline, measured(INLINE)),
        """\
MOVED: 7 changes; 1 case against baseline.json (torch N)

stack, plan
  fingerprint: FINGERPRINT before, FINGERPRINT now
  segments: 2 before, 3 now
  buckets: 2 before, 3 now
  bucket 0: 0.012 MiB float32, with layers.2.weight before, 0.008 MiB float32
    now
  bucket 1: 0.008 MiB float32, with layers.0.weight before, 0.008 MiB float32,
    with layers.2.weight now
  bucket 2: none before, 0.004 MiB float32: layers.0.weight now

stack, ddpopt-inline
  collectives of a backward: 2 allreduce before, 3 allreduce now""",
    )


def test_a_graph_more(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOBS, "breaks", True)
    assert_expected_inline(
        told(inline, measured(INLINE)),
        """\
MOVED: 3 changes; 1 case against baseline.json (torch N)

stack, plan
  fingerprint: FINGERPRINT before, FINGERPRINT now

stack, ddpopt-inline
  graphs: 1 before, 2 now
  compiled by the backend: 1 before, 2 now""",
    )


def test_a_recompile(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOBS, "grows", True)
    assert_expected_inline(
        told(inline, measured(INLINE)),
        """\
MOVED: 1 change; 1 case against baseline.json (torch N)

stack, ddpopt-inline
  recompiles: 0 before, 1 now""",
    )


def test_a_collective_more(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOBS, "buffered", True)
    assert_expected_inline(
        told(inline, measured(INLINE)),
        """\
MOVED: 1 change; 1 case against baseline.json (torch N)

stack, ddpopt-inline
  collectives outside of backwards: none before, 3 broadcast now""",
    )


def test_buckets_that_are_no_longer_the_planned_ones(
    inline: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("this reducer follows nobody")

    monkeypatch.setattr(ddpopt.dynamo.backend, "defer", refuse)
    assert_expected_inline(
        told(inline, measured(INLINE)),
        """\
MOVED: 4 changes; 1 case against baseline.json (torch N)

stack, ddpopt-inline
  check: passes before, wrong: L3: ddpopt's plan is not in force: DDP went on
    with buckets of its own now
  collectives outside of backwards: none before, 2 broadcast now
  planned = observed buckets: yes before, no now
  overlap potential: 1.000 before, 0.000 (at least 0.980 is asked) now""",
    )


def test_gradients_that_leave_only_when_the_backward_has_ended(
    inline: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddpopt.dynamo.backend, "lendable", lambda *_: [])
    assert_expected_inline(
        told(inline, measured(INLINE)),
        """\
MOVED: 1 change; 1 case against baseline.json (torch N)

stack, ddpopt-inline
  overlap potential: 1.000 before, 0.000 (at least 0.980 is asked) now""",
    )


def test_equal_segments_that_are_compiled_one_by_one(
    inline: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KNOBS, "ddp_kwargs", {"bucket_cap_mb": LAYER_MB})
    before = measured(SPLIT).figures
    monkeypatch.setattr("ddpopt.split.segments.signature", lambda *_: None)
    assert_expected_inline(
        told(before, measured(SPLIT)),
        """\
MOVED: 1 change; 1 case against baseline.json (torch N)

stack, ddpopt-split
  compiled by the backend: 3 before, 5 now""",
    )


def rounding(units: int) -> Callable[..., Any]:
    """A backend whose gradients are off by some units in the last place; 0 for one that is right."""

    def compiler(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        call = lookup_backend("aot_eager")(gm, example_inputs)
        return lambda *args: tuple(_off(out, units) for out in call(*args))

    return compiler


def _off(out: Tensor, units: int) -> Tensor:
    apply: Any = _Off.apply  # torch types it not
    result: Tensor = apply(out, units)
    return result


class _Off(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, units: int) -> Tensor:
        ctx.units = units
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (1 + ctx.units * 2**-23), None


def test_a_margin_that_shrinks(alone: None) -> None:
    before = measured(INLINE, rounding(0))
    assert before.problems == ()
    found = measured(INLINE, rounding(6))
    assert found.problems == ()
    assert_expected_inline(
        told(before.figures, found, figures=False),
        """\
MOVED: 1 change; 1 case against baseline.json (torch N)

stack, ddpopt-inline
  worst distance at L2, as a share of its bound: N.NNN before, N.NNN (at most
    N.NNN is asked) now""",
    )


class Clock:
    """Counts its readings, and what is said to take long."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize(
    ("slowed", "modes", "what"),
    [("certify", (), "planning"), ("lendable", ("ddpopt-inline",), "compile, ddpopt-inline")],
    ids=["planning", "compiling"],
)
def test_time_that_grows_out_of_its_band(
    slowed: str, modes: tuple[str, ...], what: str, inline: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KNOBS, "ddp_kwargs", {})
    monkeypatch.setattr(KNOBS, "width", 300)  # two buckets by default; torch's optimizer fails below 1 MiB
    monkeypatch.setattr(ratios, "ROUNDS", 1)
    monkeypatch.setattr(ratios, "MORE_ROUNDS", 2)
    monkeypatch.setattr(ratios, "processor_seconds", clock := Clock())
    function = getattr(ddpopt.dynamo.backend, slowed)

    def time_it(before: dict[str, Any]) -> Measured:
        with joined() as ranks:
            found, failures = ratios.time_ratios(stack(), modes, "aot_eager", ranks, before, Bands())
        assert failures == {}
        return Measured(replace(inline, ratios={STACK: found}))

    def slowly(*args: Any) -> Any:
        clock.now += 100
        return function(*args)

    before = time_it({})
    monkeypatch.setattr(ddpopt.dynamo.backend, slowed, slowly)
    text = told(before.figures, time_it(dict(before.figures.ratios[STACK])), figures=False)
    assert (
        f"{what}, as a share of torch's time: N.NNN before, N.NNN (at most N.NNN is asked) now"
        in " ".join(text.split())
    )


def test_ddpopt_failing_while_it_is_timed_is_no_ratio(
    inline: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no proof today")

    monkeypatch.setattr(ddpopt.dynamo.backend, "certify", fail)
    timed = replace(SPLIT, modes=(), timed=(STACK,))
    with joined() as ranks:
        found = time_case(STACK, timed, "aot_eager", ranks, {}, Bands())
    text = told(replace(inline, ratios={STACK: {"planning": 0.5}}), assembled([], [found], ()))
    assert "stack, planning\n  check: passes before, " in text
    assert "no proof today" in text


def test_a_case_that_is_missing(inline: Figures) -> None:
    other = replace(inline, cases={"other": inline.cases[STACK]})
    assert_expected_inline(
        told(inline, Measured(other)),
        """\
MOVED: 2 changes; 1 case against baseline.json (torch N)

stack
  case: there before, missing now

other
  case: not in the baseline before, there now""",
    )


def test_a_run_of_nothing(inline: Figures) -> None:
    assert_expected_inline(
        told(inline, measured(Settings(targets=()))),
        """\
MOVED: 2 changes; 0 cases against baseline.json (torch N)

the gate
  run: 1 cases before, no case was measured now

stack
  case: there before, missing now""",
    )


def test_a_mode_that_is_no_longer_measured(inline: Figures) -> None:
    case = inline.cases[STACK]
    other = replace(case, modes={"ddpopt-split": case.modes["ddpopt-inline"]})
    assert_expected_inline(
        told(inline, Measured(Figures({STACK: other}))),
        """\
MOVED: 2 changes; 1 case against baseline.json (torch N)

stack, ddpopt-inline
  mode: there before, missing now

stack, ddpopt-split
  mode: not in the baseline before, there now""",
    )


def test_a_backend_that_fails(inline: Figures) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("this backend is broken")

    text = " ".join(told(inline, measured(INLINE, broken)).split())
    assert "stack, ddpopt-inline check: passes before, wrong: run: " in text
    assert "this backend is broken" in text


def test_a_model_that_no_longer_runs(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOBS, "fails", True)
    found = measured(INLINE)
    assert found.figures.cases == {}
    text = " ".join(told(inline, found).split())
    assert "stack, plan check: passes before, it cannot be planned: " in text
    assert "stack, ddpopt-inline check: passes before, eager DDP itself fails: ValueError: this model" in text


def test_fewer_tests_collected(inline: Figures, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_a(): pass\ndef test_b(): pass\n")
    (tmp_path / "test_two.py").write_text("def test_c(): pass\n")
    counts, failures = collected([str(tmp_path)])
    assert (counts, failures) == ({str(tmp_path): 3}, {})
    (tmp_path / "test_two.py").unlink()
    found = Measured(replace(inline, tests=collected([str(tmp_path)])[0]))
    text = told(replace(inline, tests=counts), found)
    assert_expected_inline(
        text.replace(str(tmp_path), "tests"),
        """\
MOVED: 1 change; 1 case, 2 tests collected against baseline.json (torch N)

tests
  tests collected: 3 before, 2 now""",
    )


def test_tests_that_cannot_be_collected(inline: Figures, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("import no_such_module\n")
    found = assembled([], [], [str(tmp_path)])
    text = told(replace(inline, tests={str(tmp_path): 3}), found)
    assert "check: passes before, pytest --collect-only ended with exit code 2:" in text
    assert "No module named 'no_such_module'" in text


def test_every_module_of_the_gate_is_named_where_it_begins() -> None:
    package = importlib.import_module("ddpopt.gate")
    modules = {file.stem for file in Path(str(package.__file__)).parent.glob("*.py")} - {"__init__"}
    named = set(re.findall(r"`(\w+)`", str(package.__doc__)))
    assert modules == named
