"""Fixtures that several unit tests share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def unmeasured_and_untraced() -> Iterator[None]:
    """Dynamo does without what nobody reads here, and what costs a fifth of the whole run's time.

    It does not time its guards, for which it floods the caches first, and does not write each graph into the
    structured trace, for which pytest's log handler would be reason enough.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
        patch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
        yield
