"""Every cell of the tables of what an engine and a backend can change is found, and right ones are right."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ddpopt.cases.case import Case
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.trials.on_rank import STEPS
from ddpopt.judge.verdict import Status
from ddpopt.ranks.group import Ranks
from tests.selftest import backend_cells
from tests.selftest.backend_cells import STEP_ROWS, DamagedBackend, DamagedStep
from tests.selftest.cells import CASE, Cell, cells, engine_of, restore

Make = Callable[[Cell | None], tuple[Engine, Any]]


@dataclass(frozen=True)
class Table:
    """A table of cells.

    Attributes:
        case: what is trained.
        cells: all of them.
        every: of how many cells one is in the sample of the day.
        make: makes the engine and the backend with a cell's fault, or right ones.
    """

    case: Case
    cells: Sequence[Cell]
    every: int
    make: Make


NAMED = ("anomaly detection",)
"""Settings under which a later step is refused by the name of the setting, so that no number is judged."""
TABLES = {
    "engines": Table(CASE, [*cells()], 31, lambda cell: (engine_of(cell), None)),
    "backends": Table(
        backend_cells.CASE,
        [*backend_cells.cells()],
        113,
        lambda cell: (mode("whole"), DamagedBackend(cell)),
    ),
    "steps": Table(
        backend_cells.CASE,
        [*backend_cells.cells(STEP_ROWS)],
        89,
        lambda cell: (mode("ddpopt-step"), DamagedStep(cell)),
    ),
}


@pytest.fixture
def reference(ranks: Ranks, table: str) -> Iterator[Reference]:
    directory = os.getcwd()
    bench = Bench(Subject(TABLES[table].case, option("default"), STEPS, ranks.device), ranks)
    found = Reference.make(bench)
    assert found is not None, bench.failures
    yield found
    bench.close()
    os.chdir(directory)


def missed(reference: Reference, chosen: Sequence[Cell], make: Make) -> list[str]:
    """The cells that are called right."""
    found = []
    directory = os.getcwd()
    for cell in chosen:
        trial = judge(reference, *make(cell))
        restore()
        os.chdir(directory)
        named = [name for name in NAMED if name in str(cell) and name in trial.reason]
        is_named = trial.status is Status.REFUSED and bool(named)
        if trial.status is not Status.WRONG and not is_named:
            found.append(f"{cell}: {trial.status} {trial.reason}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("table", TABLES)
def test_what_is_right_is_right_and_each_cell_of_a_sample_is_found(reference: Reference, table: str) -> None:
    cells, make = TABLES[table].cells, TABLES[table].make
    trial = judge(reference, *make(None))
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
    assert missed(reference, cells[:: TABLES[table].every], make) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("table", TABLES)
def test_each_cell_is_found(reference: Reference, table: str) -> None:
    assert missed(reference, TABLES[table].cells, TABLES[table].make) == []
