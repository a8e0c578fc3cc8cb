"""Compiled training on several ranks: eager DDP's gradients, and the plan's buckets, at every iteration.

By day with the corpus cases in which ranks matter; ``tests/integration/cases`` has the others in one process.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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


# test_corpus_reports.py cuts for Inductor by day
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", [pytest.param("split", marks=pytest.mark.nightly), "inline"])
def test_inductor_gives_the_gradients_of_eager_ddp(strategy: Strategy, ranks: Ranks) -> None:
    torch._dynamo.reset()
    case = corpus.case("tied")
    eager, ddp = wrapped(case, ranks), wrapped(case, ranks)
    reference = train(case, eager, eager, ranks)
    compiled = train(case, ddp, ddpopt.compile(ddp, strategy=strategy), ranks)
    difference, where = worst_difference(compiled, reference)
    assert difference <= ROUNDINGS, f"{where} is off by {difference} roundings"


class OneLayerMoreOnRankZero(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden) if self.rank == 0 else hidden


@pytest.mark.parametrize(
    ("option", "strategy"), in_turn([("find_unused_parameters",), ("static_graph",)], STRATEGIES)
)
def test_ranks_that_use_other_parameters_accumulate_eagers_gradients(
    option: str, strategy: Strategy, ranks: Ranks
) -> None:
    torch._dynamo.reset()
    inputs = torch.randn(20, 10, device=ranks.device, generator=torch.Generator(ranks.device).manual_seed(1))
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4, option: True}
    gradients = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = OneLayerMoreOnRankZero(ranks.rank).to(ranks.device)
        ddp = DistributedDataParallel(model, **options)
        call = ddpopt.compile(ddp, backend="aot_eager", strategy=strategy) if compiled else ddp
        for _ in range(5):
            call(inputs).sum().backward()
        gradients.append([parameter.grad for parameter in ddp.parameters()])
    gathered = ranks.gather(gradients)
    # from three ranks on, a sum may have another order
    exact = 0.0 if len(gathered) <= 2 else None
    for eager, ours in gathered:
        torch.testing.assert_close(ours, eager, rtol=exact, atol=exact)
