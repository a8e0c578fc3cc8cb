"""Fixtures of the properties that compile or that train under DDP."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def unmeasured_and_untraced() -> Iterator[None]:
    """Dynamo does without what nobody reads here: its guards' times, and a trace of each graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        patch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
        yield


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone, for all examples of a module."""
    from ddpopt.testing.ranks import one_rank  # torch takes seconds, and many runs need none of it

    with one_rank():
        yield
