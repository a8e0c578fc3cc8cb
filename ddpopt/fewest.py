"""Where buckets of several dtypes close, so that there are as few as DDP's rule allows.

Whatever is open at a cut closes there, of each (dtype, device). A bucket that is filled to its limit may then
drag a few bytes of another dtype into a bucket of their own, which one gradient less would have left to the
next cut. With one dtype that cannot be, and the bucket that DDP's rule fills is always the best one.

Here gradients come in *groups* that complete together. A *stretch* is what lies between two cuts: it ends at
the latest with the group in which DDP's rule closes a bucket, and may end before. Of all ways to end
stretches the one with the fewest buckets is taken, and of these the one with the longest stretches.

Invariant: a larger limit forbids no way that a smaller one allows, so it never adds a bucket.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpopt.reducer import ParamSpec

Key = tuple[str, str]
"""What may not mix in a bucket: (dtype, device)."""
NEARLY_FULL = 0.9
"""The share of its limit at which a bucket closes where a repeated block ends."""


class First(NamedTuple):
    """The first bucket of a dtype: its limit in bytes, and what it holds of later graphs."""

    limit: int
    carried: int


def early_ends(
    groups: Sequence[Sequence[ParamSpec]],
    first: Mapping[Key, First],
    limit: int,
    block_ends: Collection[int],
) -> frozenset[int]:
    """Choose where stretches end although no bucket is filled there.

    Args:
        groups: gradients that complete together, in ready order.
        first: of each (dtype, device) that occurs with a dense gradient.
        limit: of every bucket behind the first, in bytes.
        block_ends: groups with which a repeated block ends: nearly full buckets close there.

    Returns:
        Indices into `groups`; none where one dtype is all there is.

    Six bytes fill a bucket here. If 4 and 2 of the first dtype shared one, 3 of the other would have to close
    with it, and five buckets would be needed; 4 alone, and there are four.

    >>> rows = (4, "b"), (3, "f"), (2, "b"), (2, "f"), (3, "b"), (1, "f")
    >>> groups = [[ParamSpec("", nbytes, dtype, "cpu")] for nbytes, dtype in rows]
    >>> sorted(early_ends(groups, {("b", "cpu"): First(6, 0), ("f", "cpu"): First(6, 0)}, 6, ()))
    [0]
    """
    if len(first) < 2:
        return frozenset()
    columns = [_Column.of(key, groups, first[key], limit) for key in first]
    table = _Table(groups, columns, sorted(block_ends))
    return table.early_ends()


@dataclass(frozen=True)
class _Column:
    """The gradients of one (dtype, device).

    Attributes:
        filled: bytes in all groups in front of each group, and of all at the end.
        places: the groups that have a gradient of it.
        within: for each of these, the bytes up to and with each gradient.
        first, limit: of its first bucket, and of all others.
    """

    filled: list[int]
    places: list[int]
    within: dict[int, list[int]]
    first: First
    limit: int

    @classmethod
    def of(cls, key: Key, groups: Sequence[Sequence[ParamSpec]], first: First, limit: int) -> _Column:
        sizes = [[s.nbytes for s in g if (s.dtype, s.device) == key and not s.sparse] for g in groups]
        filled = list(itertools.accumulate((sum(group) for group in sizes), initial=0))
        within = {place: list(itertools.accumulate(group)) for place, group in enumerate(sizes) if group}
        return cls(filled, list(within), within, first, limit)

    def occurs(self, start: int) -> int | None:
        """The first group from `start` on that has a gradient of it."""
        place = bisect.bisect_left(self.places, start)
        return self.places[place] if place < len(self.places) else None

    def at(self, start: int) -> First:
        """The limit of the bucket that opens in a stretch from `start` on, and what it holds already."""
        return self.first if start <= self.places[0] else First(self.limit, 0)

    def reaches(self, start: int, nbytes: float) -> int:
        """The group with which a stretch from `start` on holds so many bytes; behind the last, if none."""
        return bisect.bisect_left(self.filled, self.filled[start] + nbytes, lo=start + 1) - 1


@dataclass
class _Table:
    """All columns, and from where on which number of buckets is the fewest."""

    groups: Sequence[Sequence[ParamSpec]]
    columns: Sequence[_Column]
    block_ends: Sequence[int]
    forced: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # a sparse gradient travels alone, and what nothing will ever fill does not wait
        sparse = {place for place, group in enumerate(self.groups) if any(spec.sparse for spec in group)}
        self.forced = sorted(sparse | {column.places[-1] for column in self.columns})

    def early_ends(self) -> frozenset[int]:
        last = len(self.groups)
        fewest, following = [0] * (last + 1), [last] * (last + 1)
        latest = [self._latest_end(start) for start in range(last)]
        # those behind `start` with fewer buckets than all between, nearest last
        lower = [last]
        for start in reversed(range(last)):
            end = latest[start]
            best = (self._closed(start, end) + fewest[end], -end)
            for held, until in self._untils(start, end):
                # of the ends up to `until` the one with the fewest buckets behind it, and of these the last
                found = lower[bisect.bisect_left(lower, -until, key=lambda place: -place)]
                best = min(best, (held + fewest[found], -found))
            fewest[start], following[start] = best[0], -best[1]
            while fewest[lower[-1]] > fewest[start]:
                lower.pop()
            lower.append(start)
        ends, start = [], 0
        while start < last:
            if following[start] < latest[start]:
                ends.append(following[start] - 1)
            start = following[start]
        return frozenset(ends)

    def _untils(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Up to where a stretch from `start` on holds one dtype, two, …, if it ends before `end`."""
        places = sorted(place for c in self.columns if (place := c.occurs(start)) is not None)
        for held, until in enumerate((*places[1:], end - 1), start=1):
            if start < until < end:
                yield held, until

    def _latest_end(self, start: int) -> int:
        """Behind the group in which DDP's rule closes the first bucket of a stretch."""
        closes = [_next(self.forced, start)]
        for column in self.columns:
            occurs = column.occurs(start)
            if occurs is None:
                continue
            limit, carried = column.at(start)
            closes.append(column.reaches(start, limit - carried))
            near = max(occurs, column.reaches(start, NEARLY_FULL * limit - carried))
            closes.append(_next(self.block_ends, near))
        return 1 + min((place for place in closes if place is not None), default=len(self.groups) - 1)

    def _closed(self, start: int, end: int) -> int:
        """How many buckets a stretch has that ends where DDP's rule ends it."""
        sparse = sum(spec.sparse for spec in self.groups[end - 1])
        return sparse + sum(self._closed_of(column, start, end) for column in self.columns)

    def _closed_of(self, column: _Column, start: int, end: int) -> int:
        occurs, place = column.occurs(start), end - 1
        if occurs is None or occurs > place:
            return 0
        limit, carried = column.at(start)
        held = column.filled[place] - column.filled[start]
        closed, done, begin = 0, 0, -held - carried
        sizes = column.within.get(place, [])
        while (full := bisect.bisect_left(sizes, begin + limit, lo=done)) < len(sizes):
            closed, done, begin, limit = closed + 1, full + 1, sizes[full], column.limit
        if closed and done == len(sizes):
            return closed
        near = place in self.block_ends and sizes and sizes[-1] - begin >= NEARLY_FULL * limit
        joins = closed and not near and place != column.places[-1] and end < len(self.groups)
        return closed if joins else closed + 1


def _next(places: Sequence[int], start: int) -> int | None:
    place = bisect.bisect_left(places, start)
    return places[place] if place < len(places) else None
