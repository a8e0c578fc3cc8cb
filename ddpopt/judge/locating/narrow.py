"""The smallest part of a whole that still shows something: delta debugging.

Source: A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on
Software Engineering 28 (2002), algorithm ddmin.

Invariant: deterministic; no subset is tried twice; what is returned was seen to show it, or is the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
TRIES = 200


@dataclass(frozen=True)
class Narrowed(Generic[Item]):
    """What a search came to.

    Attributes:
        items: the smallest set found, in the order of the whole.
        tries: how many subsets were tried.
        ended: whether no item can be left out of it; else the search ran out of tries, or was ended.
    """

    items: tuple[Item, ...]
    tries: int
    ended: bool


def narrowed(
    whole: Sequence[Item],
    shows: Callable[[tuple[Item, ...]], bool | None],
    *,
    tries: int = TRIES,
) -> Narrowed[Item]:
    """Search for a smallest subset that shows something.

    Args:
        whole: known to show it.
        shows: whether a subset, in the order of the whole, shows it; None to end the search.
        tries: how often `shows` may be asked.

    Returns:
        A subset from which no single item can be left out, if the search came to its end.

    >>> narrowed(range(100), lambda subset: {17, 60} <= set(subset)).items
    (17, 60)
    """
    known: dict[tuple[Item, ...], bool] = {}
    current, parts = tuple(whole), 2
    while len(current) > 1:
        chunks = _divided(current, parts)
        rests = [tuple(item for item in current if item not in chunk) for chunk in chunks]
        found = None
        for subset in [*chunks, *rests] if parts > 2 else chunks:
            if subset not in known:
                answer = shows(subset) if len(known) < tries else None
                if answer is None:
                    return Narrowed(current, len(known), ended=False)
                known[subset] = answer
            if known[subset]:
                found = subset
                break
        if found is None and parts >= len(current):
            break
        parts = min(2 * parts, len(current)) if found is None else 2 if found in chunks else max(parts - 1, 2)
        current = current if found is None else found
    return Narrowed(current, len(known), ended=True)


def _divided(items: tuple[Item, ...], parts: int) -> list[tuple[Item, ...]]:
    """Divide into parts of about equal length."""
    bounds = [len(items) * index // parts for index in range(parts + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]
