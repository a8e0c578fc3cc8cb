"""Which of many like tests run by day: strategies take turns, and numbers of ranks; at night all run."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from ddpopt.ranks.environment import launched_ranks

DEFAULT_RANKS = 2


def number_of_ranks() -> int:
    """On how many ranks tests run that do not say so themselves."""
    return launched_ranks() or int(os.environ.get("DDPOPT_NPROC", DEFAULT_RANKS))


def in_turn(rows: Sequence[Sequence[Any]], strategies: Sequence[Any]) -> list[Any]:
    """Every row with every strategy; of these, by day those whose turn it is.

    On two ranks each row has one strategy, the next row the other one. On three and more, which cost that
    much more, every third row has the strategy that it has not on two.

    Args:
        rows: the arguments of each test.
        strategies: two of them, or of what else comes in two ways; the last argument of each test.
    """
    return [
        pytest.param(*row, strategy, marks=() if _has_turn(number, turn) else pytest.mark.nightly)
        for number, row in enumerate(rows)
        for turn, strategy in enumerate(strategies)
    ]


def at_night(rows: Sequence[Sequence[Any]], strategies: Sequence[Any]) -> list[Any]:
    """Every row with every strategy, none of them by day."""
    marks = pytest.mark.nightly
    return [pytest.param(*row, strategy, marks=marks) for row in rows for strategy in strategies]


def _has_turn(number: int, turn: int) -> bool:
    if number_of_ranks() > 2:
        return (number + turn) % 2 == 0 and number % 3 == 0
    return (number + turn) % 2 == 1
