"""Tests that start, follow and end processes, and compile nothing themselves."""

import os
from collections.abc import Iterator

import pytest

from ddpopt.ranks.environment import environment_of_no_rank


@pytest.fixture(scope="session", autouse=True)
def spared() -> None:
    """Nothing: getting ready to compile takes seconds."""


@pytest.fixture(autouse=True)
def of_no_rank() -> Iterator[None]:
    """A test here is no rank, also where one of torchrun's runs it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment_of_no_rank().keys() - {"PYTEST_CURRENT_TEST"}:
            patch.delenv(name)
        yield
