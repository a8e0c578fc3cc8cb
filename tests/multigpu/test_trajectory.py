"""ddpopt.judge.trajectory: what adds up over many steps is found, and rounding is not called wrong."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from ddpopt.cases.case import Case
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trajectory.free import FreeRuns, free_runs
from ddpopt.judge.trials.following import follow
from ddpopt.judge.trials.on_rank import STEPS
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks
from tests.selftest.cells import CASE, LATE, LATE_ROWS, Cell, cells, engine_of

FREE = 10
CELLS = {
    True: [*cells(LATE_ROWS)],
    False: [cell for cell in cells(LATE_ROWS) if cell.how != "last bit"],  # that is rounding
}
"""By whether an engine must be equal bit for bit."""


@contextmanager
def eager(ranks: Ranks, case: Case, name: str = "default", steps: int = FREE) -> Iterator[FreeRuns]:
    bench = Bench(Subject(case, option(name), STEPS, ranks.device, evaluates=False), ranks)
    reference = Reference.make(bench)
    assert reference is not None, bench.failures
    with free_runs(reference, steps) as runs:
        yield runs
    bench.close()


def trial_of(runs: FreeRuns, engine: Engine, backend: object = None) -> Trial:
    case, name = runs.reference.bench.subject.case.name, runs.reference.bench.subject.option.name
    return follow(runs, engine, backend, Trial(case, engine.name, name, str(backend or ""), Status.OK))


def is_late(cell: Cell) -> bool:
    return cell.when.endswith("late")


def missed(runs: FreeRuns, chosen: Sequence[Cell], *, exact: bool) -> list[str]:
    """The cells that are called right, or wrong from another step on."""
    found = []
    for cell in chosen:
        trial = trial_of(runs, engine_of(cell, exact=exact))
        steps = [finding.step for finding in trial.findings]
        if trial.status is not Status.WRONG or (is_late(cell) and steps != [LATE]):
            found.append(f"{cell}: {trial.status} {trial.reason} {steps} {trial.notes}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("exact", [True, False])
def test_a_right_engine_is_right_and_each_cell_of_a_sample_is_found(ranks: Ranks, exact: bool) -> None:
    with eager(ranks, CASE) as runs:
        trial = trial_of(runs, engine_of(None, exact=exact))
        assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
        assert trial.notes[0] == f"equal to eager DDP, bit for bit, in all of {FREE} steps"
        assert missed(runs, CELLS[exact][::9], exact=exact) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("exact", [True, False])
def test_each_cell_is_found(ranks: Ranks, exact: bool) -> None:
    with eager(ranks, CASE) as runs:
        assert missed(runs, CELLS[exact], exact=exact) == []
