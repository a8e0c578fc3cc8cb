"""ddpopt.planning.repeats: layers are found by what repeats, and only where enough of them stand in a row."""

import itertools

import pytest

from ddpopt.planning.repeats import MIN_REPEATS, block_ends


def test_too_few_blocks_are_no_repetition() -> None:
    assert block_ends("xab" + "ab" * (MIN_REPEATS - 2) + "y") == frozenset()


def test_a_run_of_entries_that_are_blocks_by_themselves_ends_everywhere() -> None:
    ends = block_ends("-" + "a" * MIN_REPEATS + "b" * MIN_REPEATS, alone=lambda entry: entry == "a")
    assert sorted(ends) == list(range(MIN_REPEATS + 1))
    assert block_ends("a" * (MIN_REPEATS - 1), alone=lambda _: True) == frozenset()


def test_what_repeats_within_a_block_does_not_hide_the_block() -> None:
    ends = sorted(block_ends("h" + "qqqod" * (MIN_REPEATS + 1) + "t"))
    assert len(ends) >= MIN_REPEATS
    assert {b - a for a, b in itertools.pairwise(ends)} == {5}


class Counted:
    """An entry that counts how often it is compared."""

    comparisons = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return isinstance(other, Counted) and self.value == other.value


@pytest.mark.parametrize("pattern", [[0, 1, 2], [0, 0, 1], [0, 1, 0, 1, 2], [0, 1, 0, 2]])
def test_work_grows_with_the_length_and_not_with_its_square(pattern: list[int]) -> None:
    work = []
    for length in (1000, 4000):
        Counted.comparisons = 0
        block_ends([Counted(pattern[place % len(pattern)] + place // 40 % 2) for place in range(length)])
        work.append(Counted.comparisons)
    assert work[1] <= 5 * work[0]
