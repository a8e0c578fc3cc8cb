"""Where a sequence repeats itself: the layers of a model, found without looking at a name.

Segments that start and end at the same place of a layer are twins, and one compilation serves them all
(twins). So a planner that may choose where a bucket ends does well to choose the end of a layer.

Invariant: time linear in the sequence; what is found depends on which entries are equal, and on nothing else.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry", bound=Hashable)

MIN_REPEATS = 6
"""Blocks in a row that make a repetition: with fewer there is little to share, and a cut moved is a cost."""


def block_ends(entries: Sequence[Entry], alone: Callable[[Entry], bool] = lambda _: False) -> frozenset[int]:
    """Find the places after which a repeated block starts or ends.

    A run of equal entries is no block, as a rule: wherever it is cut, its pieces are equal.

    Args:
        entries: what repeats, for instance one description for each place where a graph can be cut.
        alone: whether an entry is a block by itself.

    Returns:
        Indices into `entries`.

    >>> sorted(block_ends("x" + "ab" * 6 + "y"))
    [0, 2, 4, 6, 8, 10, 12]
    >>> block_ends("aaaaaaaaaaaaaaaa")
    frozenset()
    >>> sorted(block_ends("aaaaaaa", alone=lambda entry: entry == "a"))
    [0, 1, 2, 3, 4, 5, 6]
    """
    again = _next_alike(entries)
    found: set[int] = set()
    place = 0
    while place < len(entries):
        period = again[place] - place
        differs = place
        while differs + period < len(entries) and entries[differs] == entries[differs + period]:
            differs += 1
        blocks = (differs - place) // period + 1
        if blocks >= MIN_REPEATS and (period > 1 or alone(entries[place])):
            found.update(range(place - 1, place + blocks * period, period))
            place += blocks * period
        else:
            place = max(differs, place + 1)
    return frozenset(found - {-1})


def _next_alike(entries: Sequence[Hashable]) -> list[int]:
    """For each place the next one with the same entry before the same successor, else the end."""
    latest: dict[Hashable, int] = {}
    found = [len(entries)] * len(entries)
    for place in reversed(range(len(entries))):
        pair = tuple(entries[place : place + 2])
        found[place] = latest.get(pair, len(entries))
        latest[pair] = place
    return found
