"""What several folders of tests share."""

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ddpopt.ranks.group import Ranks


collect_ignore = ["support"]


@pytest.fixture(scope="session", autouse=True)
def spared() -> Iterator[None]:
    """Collections of garbage do not go through imported modules.

    Folders whose tests compile little have a fixture of their own by this name.
    """
    from ddpopt.judge.trials.on_rank import gc_frozen  # heavy, and not needed to collect tests

    with gc_frozen():
        yield


def pytest_runtest_setup() -> None:
    # Nor through what earlier tests left: a trial collects dozens of times, which took half of its time.
    if gc.get_freeze_count() > 0:
        from ddpopt.judge.trials.on_rank import collect_and_freeze

        collect_and_freeze()


@pytest.fixture(scope="module")
def alone() -> "Iterator[Ranks]":
    """This process as the only rank, for all tests of a module."""
    from ddpopt.ranks.group import joined, one_rank  # heavy, too

    with one_rank(), joined(timeout_s=60) as ranks:
        yield ranks
