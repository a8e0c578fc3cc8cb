"""What moved between two bucket tables: which bucket lost or gained which parameters.

Invariant: equal tables give nothing, and different ones at least one change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ddpopt.explanation.tables import mib, names
from ddpopt.gate.figures import BucketRow
from ddpopt.gate.moved import Change

NONE = "none"


def bucket_changes(case: str, before: Sequence[BucketRow], now: Sequence[BucketRow]) -> Iterator[Change]:
    """Compare two bucket tables.

    Args:
        case: whose.
        before: the baseline's.
        now: the run's.

    Yields:
        The number of buckets, if that moved, and each bucket that did.
    """
    if len(before) != len(now):
        yield Change(case, "plan", "buckets", str(len(before)), str(len(now)))
    for index, (was, has) in enumerate(zip_longest(before, now)):
        if was != has:
            yield Change(case, "plan", f"bucket {index}", _described(was, has), _described(has, was))


def _described(row: BucketRow | None, other: BucketRow | None) -> str:
    """A bucket, and what it has that the other one has not."""
    if row is None:
        return NONE
    size = f"{mib(row.nbytes)} MiB {row.dtype}"
    if other is None:
        return f"{size}: {names(row.params)}"
    own = [name for name in row.params if name not in other.params]
    if own:
        return f"{size}, with {names(own)}"
    reordered = row.params != other.params and set(row.params) == set(other.params)
    return f"{size}: {names(row.params, len(row.params))}" if reordered else size
