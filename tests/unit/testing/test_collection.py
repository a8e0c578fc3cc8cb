"""Whether ranks collected the same tests, and the words for a difference."""

import pytest

from ddpopt.testing.collection import ADVICE, difference, digest


def lines(*names_of: list[str]) -> list[str]:
    first, *between, last = difference(names_of).splitlines()
    assert (first, last) == ("the ranks collected different tests:", ADVICE)
    return between


def test_equal_lists_do_not_differ() -> None:
    assert difference([["a", "b"]] * 3) == ""
    assert difference([[], []]) == ""


def test_what_one_rank_lacks_and_another_has_besides_is_named_by_rank() -> None:
    assert lines(["a", "b"], ["a", "b"], ["b", "c"]) == [
        "  rank 2 lacks 1 of rank 0's 2 tests: a",
        "  rank 2 has 1 that rank 0 lacks: c",
    ]


def test_another_order_is_a_difference() -> None:
    assert lines(["a", "b", "c"], ["a", "c", "b"]) == [
        "  rank 1 has them in another order: number 1 is b on rank 0, and c here"
    ]


def test_a_name_that_stands_twice_is_a_difference() -> None:
    assert lines(["a", "b"], ["a", "b", "b"]) == [
        "  rank 1 has them in another order: 2 tests on rank 0, and 3 here"
    ]


def test_a_long_difference_is_cut() -> None:
    (line,) = lines([f"t{n}" for n in range(8)], [])
    assert line == "  rank 1 lacks 8 of rank 0's 8 tests: t0, t1, t2, t3, t4 … and 3 more"


@pytest.mark.parametrize("other", [["ab"], ["b", "a"], ["a"], ["a", "b", "b"]])
def test_a_digest_tells_lists_apart(other: list[str]) -> None:
    assert digest(["a", "b"]) == digest(["a", "b"]) != digest(other)
