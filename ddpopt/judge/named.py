"""Look-up by name among what ``verify`` knows: modes and options.

Invariant: a name that is not known is an error that lists all that are.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from ddpopt.errors import UsageError, did_you_mean

__all__ = ["Named", "named"]


class Named(Protocol):
    """What has a name."""

    @property
    def name(self) -> str:
        """The name, as a user writes it."""


N = TypeVar("N", bound=Named)


def named(name: str, known: Iterable[N], given_as: str) -> N:
    """Return what has a name.

    Args:
        name: the name.
        known: all there are.
        given_as: what the caller gave the name as: a parameter, or an option of the command line.

    Returns:
        The one of ``known`` that has this name.

    Raises:
        UsageError: there is none.
    """
    by_name = {candidate.name: candidate for candidate in known}
    if name not in by_name:
        raise UsageError(
            f"{given_as}: expected one of {', '.join(by_name)}, got {name!r}{did_you_mean(name, by_name)}"
        )
    return by_name[name]
