"""Compiled training on several ranks: eager DDP's gradients, and the plan's buckets, at every iteration.

By day with the corpus cases in which ranks matter; ``tests/integration/cases`` has the others in one process.
"""

from typing import Any

import pytest
import torch

import ddpopt
from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.planning.strategy import Strategy
from ddpopt.ranks.group import Ranks
from tests.multigpu.corpus_training import (
    RANKS_MATTER,
    ROUNDINGS,
    STRATEGIES,
    assert_trains_as_eager,
    train,
    worst_difference,
    wrapped,
)
from tests.multigpu.turns import at_night, in_turn


def each_case() -> list[Any]:
    by_day = [(corpus.case(name),) for name in RANKS_MATTER]
    others = [(case,) for case in corpus.cases() if (case,) not in by_day]
    return [*in_turn(by_day, STRATEGIES), *at_night(others, STRATEGIES)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("case", "strategy"), each_case(), ids=lambda value: getattr(value, "name", value))
def test_a_case_has_the_gradients_of_eager_ddp_and_the_buckets_of_the_plan(
    case: Case, strategy: Strategy, ranks: Ranks
) -> None:
    assert_trains_as_eager(case, strategy, ranks)


# by day test_corpus_reports.py cuts for Inductor, and tests/integration/inline has it inline on one rank
@pytest.mark.nightly
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inductor_gives_the_gradients_of_eager_ddp(strategy: Strategy, ranks: Ranks) -> None:
    torch._dynamo.reset()
    case = corpus.case("tied")
    eager, ddp = wrapped(case, ranks), wrapped(case, ranks)
    reference = train(case, eager, eager, ranks)
    compiled = train(case, ddp, ddpopt.compile(ddp, strategy=strategy), ranks)
    difference, where = worst_difference(compiled, reference)
    assert difference <= ROUNDINGS, f"{where} is off by {difference} roundings"
