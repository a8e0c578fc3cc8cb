"""Regressions, each made for real through what runs, and caught by the gate with a message that says it.

A message has all that changed: so each test shows too that what it leaves alone is measured the same again.
"""

import re
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

import ddpopt.dynamo.backend
from ddpopt.cases.case import Case
from ddpopt.errors import UnsupportedError
from ddpopt.gate.baseline import Figures, Measuring
from ddpopt.gate.comparison import Comparison, changes
from ddpopt.gate.figures import EQUAL, OK, TRAJECTORY, VERDICT, case_figures, failures
from ddpopt.ranks.group import Ranks, joined
from ddpopt.testing.drawn import DrawnModel, step

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "alone")
INLINE = Measuring(modes=("ddpopt-inline",), nproc=1)
SPLIT = Measuring(modes=("ddpopt-split",), nproc=1)
LAYER = step("linear", bias=False)
LAYER_MB = 4 * 32 * 32 / 2**20


def stack(between: str = "activation", batches: tuple[int, ...] = (4,), layers_a_bucket: int = 3) -> Case:
    """Five equal layers without biases, and something between two of them: by default two buckets."""
    steps = (LAYER, LAYER, step(between), LAYER, LAYER, LAYER)
    case = DrawnModel(steps, width=32, batches=batches).case()
    return replace(case, name="stack", ddp_kwargs={"bucket_cap_mb": layers_a_bucket * LAYER_MB})


def measured(settings: Measuring, case: Case) -> Figures:
    with joined() as ranks:
        return {"stack": case_figures(case, settings, "aot_eager", ranks)}


@pytest.fixture(scope="module")
def inline(alone: Ranks) -> Figures:
    found = measured(INLINE, stack())
    assert failures(found["stack"]) == []
    return found


def told(before: Figures, found: Figures) -> str:
    """What the gate says, without what differs between releases of torch, and between machines."""
    comparison = Comparison("baseline.json", "torch N", 1, found, changes(before, found))
    assert comparison.exit_code == 1
    text = re.sub(r"\b[0-9a-f]{16}\b", "FINGERPRINT", str(comparison))
    _, _, changed = text.partition("(torch N)\n\n")
    return changed.partition("\n\nIf this is intended")[0]


def test_one_bucket_more(inline: Figures) -> None:
    assert_expected_inline(
        told(inline, measured(INLINE, stack(layers_a_bucket=2))),
        """\
stack, plan
  fingerprint: FINGERPRINT before, FINGERPRINT now
  bucket 0: 0.012 MiB float32, linear4.weight before, 0.008 MiB float32 now
  bucket 1: linear1.weight before, linear4.weight now
  bucket 2: absent before, 0.004 MiB float32, linear1.weight now

stack, ddpopt-inline
  collectives per backward: 2 allreduce before, 3 allreduce now""",
    )


def test_a_graph_more(inline: Figures) -> None:
    assert_expected_inline(
        told(inline, measured(INLINE, stack("graph_break"))),
        """\
stack, plan
  fingerprint: FINGERPRINT before, FINGERPRINT now
  segments: 1 before, 2 now

stack, ddpopt-inline
  graphs: 1 before, 2 now
  compiled by the backend: 1 before, 2 now""",
    )


def test_a_recompile_and_a_collective_more(inline: Figures) -> None:
    grown = stack(batches=(4, 8))

    def buffered() -> nn.Module:
        model = grown.model()
        model.register_buffer("seen", torch.zeros(1))
        return model

    assert_expected_inline(
        told(inline, measured(INLINE, replace(grown, model=buffered))),
        """\
stack, ddpopt-inline
  recompiles: 0 before, 1 now
  collectives outside backward: none before, 3 broadcast now""",
    )


def test_buckets_that_are_not_the_planned_ones(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("this reducer follows nobody")

    monkeypatch.setattr(ddpopt.dynamo.backend, "defer", refuse)
    assert_expected_inline(
        told(inline, measured(INLINE, stack())),
        """\
stack, ddpopt-inline
  verdict: ok before, wrong: L3: ddpopt's plan is not in effect: DDP kept its
    own buckets now
  collectives outside backward: none before, 2 broadcast now
  planned = observed buckets: yes before, no now
  overlap, as a share of eager DDP's: 1.0 before, 0.0 now""",
    )


def test_gradients_that_leave_after_the_backward(inline: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpopt.inline.strategy.lendable", lambda *_: [])
    assert_expected_inline(
        told(inline, measured(INLINE, stack())),
        """\
stack, ddpopt-inline
  overlap, as a share of eager DDP's: 1.0 before, 0.0 now""",
    )


def test_equal_segments_that_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    case = stack(layers_a_bucket=1)
    before = measured(SPLIT, case)
    monkeypatch.setattr("ddpopt.split.segments.signature", lambda *_: None)
    assert_expected_inline(
        told(before, measured(SPLIT, case)),
        """\
stack, ddpopt-split
  compiled by the backend: 3 before, 5 now""",
    )


def test_a_model_that_no_longer_runs(inline: Figures) -> None:
    found = measured(INLINE, replace(stack(), inputs=lambda rank, step: ((torch.ones(4, 7),), {})))
    text = " ".join(told(inline, found).split())
    assert "failure: absent before, it cannot be planned: " in text
    assert re.search("verdict: ok before, eager DDP itself fails: RuntimeError: .*mat1 and mat2", text)
    assert len(failures(found["stack"])) == 2


def late(gm: fx.GraphModule, example_inputs: Any) -> Any:
    """A backend whose code is right for twenty calls."""
    calls = count()

    def run(*args: Any) -> Any:
        outputs = gm.forward(*args)
        return [output * 1.001 for output in outputs] if next(calls) >= 20 else outputs

    return run


def test_a_trajectory_that_drifts_where_single_steps_are_right(alone: Ranks) -> None:
    settings = replace(INLINE, trajectory=25)
    with joined() as ranks:
        right = case_figures(stack(), settings, "aot_eager", ranks)["ddpopt-inline"]
        wrong = {"ddpopt-inline": case_figures(stack(), settings, late, ranks)["ddpopt-inline"]}
    assert (right[VERDICT], right[TRAJECTORY]) == (OK, EQUAL)
    (failure,) = failures(wrong)
    assert failure.startswith(f"ddpopt-inline: {TRAJECTORY}: wrong: L2: from step 20 on: ")
    assert "one step from eager's state before it is right" in failure
