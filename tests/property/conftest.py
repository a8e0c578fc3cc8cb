"""Fixtures of the properties that compile or that train under DDP."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def spared(compiling_quickly: None) -> None:
    """Most properties compile each example."""


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone, for all examples of a module."""
    from ddpopt.ranks.group import one_rank  # torch takes seconds, and many runs need none of it

    with one_rank():
        yield
