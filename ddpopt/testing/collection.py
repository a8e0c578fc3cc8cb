"""Whether all ranks collected the same tests, and in words how they differ.

Invariant: no test runs on a part of the ranks only, since none runs at all before the lists are equal.
"""

import hashlib
from collections.abc import Sequence

__all__ = ["difference", "digest"]

SHOWN = 5
ADVICE = "Collect the same on every rank: nothing that is collected may depend on the rank, time or chance."


def digest(names: Sequence[str]) -> str:
    """Hash a list of tests.

    Args:
        names: ids, in the order in which they run.

    Returns:
        A text that is equal for equal lists only.
    """
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def difference(names_of: Sequence[Sequence[str]]) -> str:
    """Say how the tests of some ranks differ from those of rank 0.

    Args:
        names_of: by rank, the ids of its tests, in the order in which they run.

    Returns:
        A message for the user; empty if all lists are equal.

    >>> print(difference([["a", "b"], ["b"]]))
    the ranks collected different tests:
      rank 1 lacks 1 of rank 0's 2 tests: a
    Collect the same on every rank: nothing that is collected may depend on the rank, time or chance.
    """
    lines = [
        line for rank in range(1, len(names_of)) for line in _compared(names_of[0], rank, names_of[rank])
    ]
    return "\n".join(["the ranks collected different tests:", *lines, ADVICE]) if lines else ""


def _compared(first: Sequence[str], rank: int, names: Sequence[str]) -> list[str]:
    if list(first) == list(names):
        return []
    own, expected = set(names), set(first)
    lacking = [name for name in first if name not in own]
    besides = [name for name in names if name not in expected]
    lines = []
    if lacking:
        lines.append(f"  rank {rank} lacks {len(lacking)} of rank 0's {len(first)} tests: {_some(lacking)}")
    if besides:
        lines.append(f"  rank {rank} has {len(besides)} that rank 0 lacks: {_some(besides)}")
    return lines or [f"  rank {rank} has them in another order: {_first_swap(first, names)}"]


def _first_swap(first: Sequence[str], names: Sequence[str]) -> str:
    pairs = zip(first, names, strict=False)
    for number, (expected, got) in enumerate(pairs):
        if expected != got:
            return f"number {number} is {expected} on rank 0, and {got} here"
    return f"{len(first)} tests on rank 0, and {len(names)} here"  # one name stands there twice


def _some(names: Sequence[str]) -> str:
    more = f" … and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
