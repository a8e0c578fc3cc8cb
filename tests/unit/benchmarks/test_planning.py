"""benchmarks.planning: both optimizers cut a model of several layers, and the benchmark counts the pieces."""

import pytest

from benchmarks.planning import OPTIMIZERS, time_one

LAYERS = 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_pieces_of_each_optimizer_are_counted(name: str, one_rank_group: None) -> None:
    timing = time_one(LAYERS, OPTIMIZERS[name])
    assert timing.segments >= LAYERS
    assert len(timing.seconds) == 1
