"""Compiled training on several ranks: eager DDP's gradients, and the plan's buckets, at every iteration.

By day with the corpus cases in which ranks matter; ``tests/integration/cases`` has the others in one process.
"""

from typing import Any

import pytest

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks
from tests.support.corpus_training import RANKS_MATTER, STRATEGIES, assert_trains_as_eager
from tests.support.turns import at_night, in_turn


def each_case() -> list[Any]:
    by_day = [(corpus.case(name),) for name in RANKS_MATTER]
    others = [(case,) for case in corpus.cases() if (case,) not in by_day]
    return [*in_turn(by_day, STRATEGIES), *at_night(others, STRATEGIES)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("case", "strategy"), each_case(), ids=lambda value: getattr(value, "name", value))
def test_a_case_has_eager_gradients_and_planned_buckets(case: Case, strategy: Strategy, ranks: Ranks) -> None:
    if (ranks.backend, case.name) == ("nccl", "recommender"):
        pytest.skip("NCCL cannot sum sparse gradients, in eager DDP either")
    assert_trains_as_eager(case, strategy, ranks)
