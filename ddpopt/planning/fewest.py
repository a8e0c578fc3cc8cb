"""Where buckets of several dtypes close, so that there are as few as DDP's rule allows.

Whatever is open at a cut closes there, of each (dtype, device). A bucket that is filled to its limit may then
drag a few bytes of another dtype into a bucket of their own, which one gradient less would have left to the
next cut. With one dtype that cannot be, and the bucket that DDP's rule fills is always the best one.

Here gradients come in *groups* that complete together. A *stretch* is what lies between two cuts: it ends at
the latest with the group in which DDP's rule closes a bucket, and may end before. Of all ways to end
stretches the one with the fewest buckets is taken, and of these the one with the longest stretches.

Invariant: where as many bytes are carried in, a larger limit forbids no way that a smaller one allows, so it
never adds a bucket. The time is that of looking each group up in sorted lists.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpopt.planning.bucket_rule import ParamSpec

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
    return _Table(groups, columns, frozenset(block_ends)).early_ends()


@dataclass(frozen=True)
class _Column:
    """The gradients of one (dtype, device).

    Attributes:
        filled: bytes in all groups in front of each group, and of all at the end.
        places: the groups that have a gradient of it.
        within: for each of these, the bytes up to and with each gradient.
        first, limit: of its first bucket, and of all others.
        known: what `closings` has found.
    """

    filled: list[int]
    places: list[int]
    within: dict[int, list[int]]
    first: First
    limit: int
    known: dict[int, _Closings] = field(default_factory=dict)

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

    def closings(self, place: int) -> _Closings:
        """What closes within a group that has a gradient of it, or none."""
        if place not in self.known:
            self.known[place] = _Closings.of(self.within.get(place, []), self.limit)
        return self.known[place]


class _Closings(NamedTuple):
    """The buckets that one group fills, from each of its gradients of one dtype on.

    Attributes:
        sizes: bytes up to and with each gradient.
        number: how many buckets are filled, if an empty one opens in front of this gradient.
        rest: the first gradient that is left over then.
    """

    sizes: list[int]
    number: list[int]
    rest: list[int]

    @classmethod
    def of(cls, sizes: list[int], limit: int) -> _Closings:
        number, rest = [0] * (len(sizes) + 1), list(range(len(sizes) + 1))
        for index in reversed(range(len(sizes))):
            full = bisect.bisect_left(sizes, limit + (sizes[index - 1] if index else 0), lo=index)
            if full < len(sizes):
                number[index], rest[index] = 1 + number[full + 1], rest[full + 1]
        return cls(sizes, number, rest)


@dataclass
class _Table:
    """All columns, and from where on which number of buckets is the fewest."""

    groups: Sequence[Sequence[ParamSpec]]
    columns: Sequence[_Column]
    block_ends: frozenset[int]
    ends_of_blocks: list[int] = field(init=False)
    forced: list[int] = field(init=False)
    sparse: list[int] = field(init=False)

    def __post_init__(self) -> None:
        # a sparse gradient travels alone, and what nothing will ever fill does not wait
        self.ends_of_blocks = sorted(self.block_ends)
        self.sparse = [sum(spec.sparse for spec in group) for group in self.groups]
        alone = {place for place, number in enumerate(self.sparse) if number}
        self.forced = sorted(alone | {column.places[-1] for column in self.columns})

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
        occurs = (column.occurs(start) for column in self.columns)
        places = sorted(place for place in occurs if place is not None and place < end)
        for held, until in enumerate((*places[1:], end - 1), start=1):
            if until > start:
                yield held, until

    def _latest_end(self, start: int) -> int:
        """Behind the group in which DDP's rule closes the first bucket of a stretch."""
        closes = [_next(self.forced, start)]
        for column in self.columns:
            occurs = column.occurs(start)
            if occurs is None:
                continue
            limit, carried = column.at(start)
            closes.append(max(occurs, column.reaches(start, limit - carried)))
            near = max(occurs, column.reaches(start, NEARLY_FULL * limit - carried))
            closes.append(_next(self.ends_of_blocks, near))
        return 1 + min((place for place in closes if place is not None), default=len(self.groups) - 1)

    def _closed(self, start: int, end: int) -> int:
        """How many buckets a stretch has that ends where DDP's rule ends it."""
        return self.sparse[end - 1] + sum(self._closed_of(column, start, end) for column in self.columns)

    def _closed_of(self, column: _Column, start: int, end: int) -> int:
        occurs, place = column.occurs(start), end - 1
        if occurs is None or occurs > place:
            return 0
        limit, carried = column.at(start)
        closings = column.closings(place)
        begin = carried + column.filled[place] - column.filled[start]
        first = bisect.bisect_left(closings.sizes, limit - begin)
        if first == len(closings.sizes):
            return 1  # filled by nobody here, and closed with the others
        closed, rest = 1 + closings.number[first + 1], closings.rest[first + 1]
        left = closings.sizes[-1] - closings.sizes[rest - 1]
        near = place in self.block_ends and left >= NEARLY_FULL * column.limit
        stays = rest < len(closings.sizes) and (near or place == column.places[-1])
        return closed + stays  # else what is left joins the bucket that closed last


def _next(places: Sequence[int], start: int) -> int | None:
    place = bisect.bisect_left(places, start)
    return places[place] if place < len(places) else None
