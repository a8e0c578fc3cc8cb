"""What several folders of tests share."""

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ddpopt.ranks.group import Ranks


collect_ignore = ["support"]


_sparing: list[bool] = []
"""Not empty once imported modules are spared; to ask Python for it takes as long as a collection."""


@pytest.fixture(scope="session", autouse=True)
def spared() -> Iterator[None]:
    """Collections of garbage do not go through imported modules.

    Folders whose tests compile little have a fixture of their own by this name.
    """
    from ddpopt.judge.trials.on_rank import gc_frozen  # heavy, and not needed to collect tests

    with gc_frozen():
        _sparing.append(True)
        yield
        _sparing.clear()


def pytest_runtest_setup() -> None:
    # Nor through what earlier tests left: a trial collects dozens of times, which took half of its time.
    if _sparing:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def trimmed(spared: None) -> None:
    """Freed memory goes back to the system, which takes too long to do for each test."""
    if _sparing:
        from ddpopt.judge.trials.on_rank import collect_and_freeze

        collect_and_freeze()


@pytest.fixture(scope="module")
def alone() -> "Iterator[Ranks]":
    """This process as the only rank, for all tests of a module."""
    from ddpopt.ranks.group import joined, one_rank  # heavy, too

    with one_rank(), joined(timeout_s=60) as ranks:
        yield ranks
