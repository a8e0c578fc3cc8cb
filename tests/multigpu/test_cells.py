"""Every cell of the table of what a step can change is found by the judge, and the right engine is right."""

import os
from collections.abc import Iterator, Sequence

import pytest

from ddpopt.judge.judge import judge
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.options import option
from ddpopt.judge.trials import STEPS
from ddpopt.judge.verdict import Status
from ddpopt.ranks.group import Ranks
from tests.selftest.cells import CASE, Cell, cells, engine_of, restore

BY_DAY = [*cells()][::13]


@pytest.fixture
def reference(ranks: Ranks) -> Iterator[Reference]:
    directory = os.getcwd()
    bench = Bench(Subject(CASE, option("default"), STEPS, ranks.device), ranks)
    found = Reference.make(bench)
    assert found is not None, bench.failures
    yield found
    bench.close()
    os.chdir(directory)


def missed(reference: Reference, chosen: Sequence[Cell]) -> list[str]:
    """The cells that are called right."""
    found = []
    directory = os.getcwd()
    for cell in chosen:
        trial = judge(reference, engine_of(cell), None)
        restore()
        os.chdir(directory)
        if trial.status is not Status.WRONG:
            found.append(f"{cell}: {trial.status} {trial.reason}")
    return found


@pytest.mark.timeout(600)
def test_a_right_engine_is_right_and_each_cell_of_a_sample_is_found(reference: Reference) -> None:
    trial = judge(reference, engine_of(None), None)
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
    assert missed(reference, BY_DAY) == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_each_cell_is_found(reference: Reference) -> None:
    assert missed(reference, [*cells()]) == []
