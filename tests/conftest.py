"""What several folders of tests share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ddpopt.ranks.group import Ranks


collect_ignore = ["support"]


@pytest.fixture(scope="session")
def compiling_quickly() -> Iterator[None]:
    """Dynamo does without what nobody reads here, and what costs a third of the time of most tests."""
    from ddpopt.judge.trials.on_rank import gc_frozen  # heavy, and not needed to collect tests

    with gc_frozen():
        yield


@pytest.fixture(scope="module", autouse=True)
def spared(compiling_quickly: None) -> None:
    """What earlier modules left is no garbage, and the collections in each trial do not go through it.

    Folders whose tests compile little have a fixture of their own by this name.
    """
    from ddpopt.judge.trials.on_rank import collect_and_freeze

    collect_and_freeze()


@pytest.fixture(scope="module")
def alone() -> "Iterator[Ranks]":
    """This process as the only rank, for all tests of a module."""
    from ddpopt.ranks.group import joined, one_rank  # heavy, too

    with one_rank(), joined(timeout_s=60) as ranks:
        yield ranks
