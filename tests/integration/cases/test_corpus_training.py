"""Every corpus case in a group of one: eager DDP's gradients, and the plan's buckets, at every iteration."""

from typing import Any

import pytest

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks
from tests.support.corpus_training import RANKS_MATTER, STRATEGIES, assert_trains_as_eager
from tests.support.turns import at_night, in_turn

REPORTED = ("gpt", "llama", "linear8", "growing_length", "selective_checkpoint", "nested")
"""Long ones that the reports about them train on ranks by day."""


def each_case() -> list[Any]:
    on_one = [(case,) for case in corpus.cases() if case.name not in RANKS_MATTER]
    reported = [(corpus.case(name),) for name in REPORTED]
    by_day = [row for row in on_one if row not in reported]
    later = [row for row in by_day if row not in by_day[::4]]
    return [*in_turn(by_day[::4], STRATEGIES), *at_night([*later, *reported], STRATEGIES)]


@pytest.mark.parametrize(("case", "strategy"), each_case(), ids=lambda value: getattr(value, "name", value))
def test_a_case_has_eager_gradients_and_planned_buckets(case: Case, strategy: Strategy, alone: Ranks) -> None:
    assert_trains_as_eager(case, strategy, alone)
