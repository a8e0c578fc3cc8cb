"""What is refused, in the words in which a user reads it."""

from collections.abc import Callable

import pytest

from ddpopt.errors import DdpoptError, UsageError


def refusal(action: Callable[[], object], kind: type[DdpoptError] = UsageError) -> str:
    """The message of the error that an action has to raise."""
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)
