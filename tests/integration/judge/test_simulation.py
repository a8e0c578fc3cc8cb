"""ddpopt.judge.simulation: what would hang or differ on many ranks is found; the rest is right."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpopt.cases import corpus
from ddpopt.cases.matrix import CASES
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.simulation.evaluating import Evaluations
from ddpopt.judge.simulation.simulate import not_simulated, simulate
from ddpopt.judge.training.moments import bytes_of_tensors
from ddpopt.judge.training.options import OPTIONS, option
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.environment import RANK_VARIABLES
from tests.selftest import backend_cells
from tests.selftest.backend_cells import DamagedBackend
from tests.selftest.cells import CASE, Cell, cells, engine_of, restore
from tests.support.simulated_programs import KNOWS_RANK, ODD_ONE, case_of

RANKS = 8
FEW = 3
NOT_SEEN = (
    "memory",
    "output, after backward, another rank's",
    "output, evaluation, another rank's",
    "settings, forward, default device",
    "settings, after backward, default device",
    "settings, backward, default device",
)
"""What grows with the steps, and values of other ranks, are not simulated, and the page says so. Where a
default device stays changed, the judge itself fails: such a trial is broken, and never right. Where a graph
changes it in backward, autograd puts it back; ranks of their own compile again then, and simulated ones begin
each step with the settings of the first."""
UNUSED = {"find_unused_parameters": True}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _state_restored() -> Iterator[None]:
    """A simulation leaves no group, no rank, and no kernel of its own."""
    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    yield
    assert not dist.is_initialized()
    assert {name: os.environ.get(name) for name in RANK_VARIABLES} == before
    c10d: Any = dist
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        total = torch.ones(3)
        works = [dist.all_reduce(total, async_op=True)]
        assert works[0] is not None
        works[0].wait()
        assert (dist.get_rank(), total.tolist()) == (0, [1.0, 1.0, 1.0])
    finally:
        dist.destroy_process_group()


def simulated(kind: str, name: str = "ddpopt-inline", ranks: int = RANKS, **ddp_kwargs: Any) -> Trial:
    return simulate(
        Subject(case_of(kind, **ddp_kwargs), option("default"), 3, CPU), mode(name), "aot_eager", ranks
    )


WRONG: dict[str, tuple[str, ...]] = {
    "a branch on the rank": (
        "step 0: rank 5 would send",
        "simulated_programs.py",
        "rank() == ODD_ONE",
        "no gradient for second.weight",
    ),
    "an average on rank 0": ("step 0: rank 0 would send", "ranks 1-7", "rank() == 0"),
    "a hook on rank 0": ("step 0: rank 0 would send", "ranks 1-7", "in averaged"),
    "an attribute of rank 0": ("step 0: rank 0 would send", "if self.writes_log"),
    "a failing rank": ("step 0: rank 5 would fail while 7 others wait: ValueError: a bad sample",),
    "fewer batches": ("step 2: rank 5 would fail while 7 others wait: StopIteration",),
    "another model": ("rank 5: last.weight is torch.float32 (24, 16), on rank 0 torch.float32 (16, 16)",),
    "another size": ("step 1: rank 5 would compile", "input 0 is torch.float32 (5, 16)"),
    "another root": ("step 0: rank 5 would send", "broadcast (from rank 1)", "broadcast (from rank 0)"),
    "another reduction": (
        "step 0: rank 5 would send",
        "allreduce (max) of 4 bytes",
        "allreduce of 4 bytes",
    ),
    "a message to nobody": ("message 0 from rank 5 to rank 0", "send (to rank 0)", "nothing on the other"),
    "an evaluation of rank 5": ("in an evaluation after the last step: rank 5 would send 1", "barrier"),
    "a model that one rank announces": ("while its model is made, rank 5 would send 1", "barrier"),
    "a late counter that sends": ("step 2: rank 5 would send", "self.late > 2"),
}
WRONG_BY_NIGHT = ("an average on rank 0", "another reduction", "an attribute of rank 0", "another model")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.nightly if kind in WRONG_BY_NIGHT else ()) for kind in WRONG],
)
def test_a_rank_that_would_keep_others_waiting_is_named_with_the_cause(kind: str) -> None:
    trial = simulated(kind)
    assert trial.status is Status.WRONG, trial.reason
    assert {finding.level for finding in trial.findings} == {"L3"}
    message = "; ".join(finding.message for finding in trial.findings)
    assert [words for words in WRONG[kind] if words not in message] == []


def test_a_branch_on_data_is_found_where_only_some_ranks_take_it() -> None:
    trial = simulated("a branch on data", ranks=12)
    (finding,) = trial.findings
    assert finding.ranks == (9,)
    assert "x[0, 0] > 1.5" in finding.message


RIGHT_BY_DAY = ((KNOWS_RANK, "ddpopt-inline"), ("a counter", "ddpopt-split"))
RIGHT = (
    "nothing",
    "an average on all ranks",
    "a constant of the rank",
    KNOWS_RANK,
    "a counter",
    "a late counter",
    "a metric",
    "sizes of ranks",
)
COUNTERS = ("a counter", "a late counter")


def right_ones() -> list[Any]:
    """By day two; a step refuses attributes that change, and takes the rank as a constant."""
    names = ("ddpopt-inline", "ddpopt-split", "ddpopt-step")
    return [
        pytest.param(kind, name, marks=() if (kind, name) in RIGHT_BY_DAY else pytest.mark.nightly)
        for name in names
        for kind in RIGHT
        if name != "ddpopt-step" or kind not in (*COUNTERS, "a constant of the rank", KNOWS_RANK)
    ]


@pytest.mark.parametrize(("kind", "name"), right_ones())
def test_a_program_that_is_right_on_all_ranks_is_right(kind: str, name: str) -> None:
    trial = simulated(kind, name, FEW)
    assert (trial.status, trial.findings, trial.unjudged) == (Status.OK, (), ())


def test_ranks_may_use_different_parameters_where_ddp_looks_for_them() -> None:
    assert simulated("a branch on the rank", "ddpopt-split", ODD_ONE + 1, **UNUSED).status is Status.OK


def test_a_rank_evaluates_from_what_its_own_last_step_left() -> None:
    subject = Subject(CASES[2], option("default"), 2, CPU)  # whose buffers are broadcast
    trial = simulate(subject, mode("ddpopt-step"), "eager", 3)
    assert (trial.status, trial.findings) == (Status.BROKEN, ())  # what is broadcast in a graph is not known


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("an average that matters", "values that other ranks send"),
        ("a counter outside", "takes its step again"),
        ("a count that matters", "values that other ranks send"),
        ("a log on rank 0", "ranks 1, 2: hooks of first"),
        ("a message that is received", "recv (from rank 0) of 4 bytes"),
    ],
)
def test_what_a_simulation_cannot_know_is_not_called_right(kind: str, reason: str) -> None:
    trial = simulated(kind, ranks=FEW)
    assert (trial.status, trial.findings) == (Status.BROKEN, ())
    assert reason in trial.reason


def test_sharded_modes_and_the_options_that_the_page_lists_are_refused() -> None:
    assert simulated("nothing", "fully_shard").status is Status.REFUSED
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `join`")]
    eager = mode("eager")
    assert {each.name for each in OPTIONS if not_simulated(eager, each)} == {*re.findall(r"`(\w+)`", row)}
    trial = simulate(Subject(corpus.case("gpt"), option("join"), 3, CPU), eager, None, 2)
    assert (trial.status, trial.simulated) == (Status.REFUSED, 2)


def test_memory_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    findings = Evaluations.findings

    def measured(self: Evaluations, name: str) -> Any:
        found = findings(self, name)
        held.append(bytes_of_tensors())
        return found

    monkeypatch.setattr(Evaluations, "findings", measured)
    for ranks in (4, 24):
        trial = simulate(Subject(corpus.case("gpt"), option("default"), 2, CPU), mode("eager"), None, ranks)
        assert trial.status is Status.OK
    few, many = held
    assert many < 1.05 * few


def test_a_damaged_backend_is_found() -> None:
    assert missed_backends([*backend_cells.cells()][:1]) == []


def missed_backends(chosen: list[Cell]) -> list[str]:
    subject = Subject(backend_cells.CASE, option("default"), 3, CPU)
    found = []
    for cell in chosen:
        trial = simulate(subject, mode("whole"), DamagedBackend(cell), 2)
        restore()
        if trial.status is not Status.WRONG:
            found.append(f"{cell}: {trial.status} {trial.reason}")
    return found


def missed_engines(chosen: list[Cell]) -> list[str]:
    subject = Subject(CASE, option("default"), 3, CPU)
    directory = os.getcwd()
    found = []
    for cell in chosen:
        trial = simulate(subject, engine_of(cell), None, 2)
        restore()
        os.chdir(directory)
        if trial.status is not Status.WRONG:
            found.append(f"{cell}: {trial.status} {trial.reason}")
    return found


def test_damaged_engines_are_found_by_two_simulated_ranks_as_by_two_real_ones() -> None:
    chosen = [cell for cell in cells() if not str(cell).startswith(NOT_SEEN)]
    assert missed_engines(chosen[::37]) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_each_damaged_engine_is_found() -> None:
    assert missed_engines([cell for cell in cells() if not str(cell).startswith(NOT_SEEN)]) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_each_damaged_backend_is_found() -> None:
    chosen = [cell for cell in backend_cells.cells() if not str(cell).startswith(NOT_SEEN)]
    assert missed_backends(chosen) == []
