"""Delta debugging: what is found, and what it costs."""

from collections.abc import Callable

import pytest

from ddpopt.judge.locating.narrow import narrowed

WHOLE = tuple(range(64))
Shows = Callable[[tuple[int, ...]], bool]


def needs(*items: int) -> Shows:
    return lambda subset: set(items) <= set(subset)


@pytest.mark.parametrize("guilty", [(0,), (63,), (31, 32), (5, 17, 60), tuple(range(40, 48))])
def test_exactly_what_is_needed_is_found(guilty: tuple[int, ...]) -> None:
    found = narrowed(WHOLE, needs(*guilty))
    assert found.items == guilty
    assert found.ended


def test_what_is_found_cannot_do_without_any_item_even_where_several_sets_would_do() -> None:
    def shows(subset: tuple[int, ...]) -> bool:
        return {3, 50} <= set(subset) or {7, 8, 9} <= set(subset)

    found = narrowed(WHOLE, shows).items
    assert shows(found)
    assert not any(shows(tuple(item for item in found if item != left_out)) for left_out in found)


def test_a_single_guilty_item_costs_twice_the_logarithm() -> None:
    tries = [narrowed(WHOLE, needs(item)).tries for item in WHOLE]
    assert max(tries) == 12


def test_no_subset_is_tried_twice() -> None:
    seen: list[tuple[int, ...]] = []

    def shows(subset: tuple[int, ...]) -> bool:
        seen.append(subset)
        return {5, 17, 60} <= set(subset)

    assert narrowed(WHOLE, shows).tries == len(seen) == len(set(seen))


def test_a_search_that_may_try_no_more_returns_what_it_has() -> None:
    found = narrowed(WHOLE, needs(5), tries=3)
    assert (found.items, found.tries, found.ended) == (tuple(range(8)), 3, False)
    found = narrowed(WHOLE, lambda _: None)
    assert (found.items, found.tries, found.ended) == (WHOLE, 0, False)
