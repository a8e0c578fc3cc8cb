"""Several process groups: DDP over some ranks, several modules, a group that is replaced in training."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.cases.corpus.ddp_rows import Linears
from ddpopt.cases.corpus.draws import seeded
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import PlanMismatchError
from ddpopt.planning.plan import Strategy
from ddpopt.ranks.group import Ranks
from tests.support.models import plan_of
from tests.support.refusals import refusal

pytestmark = pytest.mark.world_size(4)
PAIRS, NEIGHBOURS = ([0, 2], [1, 3]), ([0, 1], [2, 3])
STEPS = 4


def groups(*parts: Sequence[int]) -> Any:
    c10d: Any = dist  # torch types neither this function nor its results
    return c10d.new_subgroups_by_enumeration([*parts])[0]


def towers(ranks: Ranks, *process_groups: Any) -> list[Any]:
    models = [seeded(Linears, dim=8, layers=3).to(ranks.device) for _ in process_groups]
    cap: Any = {"bucket_cap_mb": 0.0003}
    pairs = zip(models, process_groups, strict=True)
    return [DistributedDataParallel(model, process_group=group, **cap) for model, group in pairs]


def trained(
    ddps: Sequence[Any], call: Callable[[Tensor], Tensor], ranks: Ranks, between: Callable[[int], None]
) -> list[list[Tensor]]:
    found = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + ranks.rank)
        torch.autograd.backward(call(torch.randn(4, 8, device=ranks.device)).square().mean())
        found.append([p.grad.clone() for ddp in ddps for p in ddp.module.parameters()])
        for ddp in ddps:
            ddp.zero_grad()
        between(step)
    return found


def nothing(_: int) -> None:
    pass


def words(members: Sequence[int], group: Any) -> str:
    return f"{group.group_name} (ranks {', '.join(map(str, members))})"


@pytest.mark.parametrize("backend", ["ddpopt-split-aot_eager", "ddpopt-inline-aot_eager"])
def test_modules_on_different_groups_train_in_one_compiled_function(backend: str, ranks: Ranks) -> None:
    pair, near = groups(*PAIRS), groups(*NEIGHBOURS)
    with torch._dynamo.config.patch(optimize_ddp=False):
        first, second = ddps = towers(ranks, pair, near)
        expected = trained(ddps, lambda x: second(first(x)), ranks, nothing)
    torch._dynamo.reset()
    first, second = ddps = towers(ranks, pair, near)
    step = torch.compile(lambda x: second(first(x)), backend=backend)
    with ddpopt.observe(first) as seen, ddpopt.observe(second) as seen_too:
        gradients = trained(ddps, step, ranks, nothing)
    plans = [imposed_plan(ddp) for ddp in ddps]

    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    own = [words(PAIRS[ranks.rank % 2], pair), words(NEIGHBOURS[ranks.rank // 2], near)]
    assert [plan and plan.group for plan in plans] == own
    for plan, observed in zip(plans, (seen, seen_too), strict=True):
        assert plan is not None
        assert [{*b.params} for b in observed.buckets] == [{*b.params} for b in plan.buckets]
        assert {b.group for b in observed.buckets} == {plan.group}


@pytest.mark.parametrize("strategy", ["split", "inline"])
def test_a_group_is_replaced_while_a_module_of_some_ranks_trains(strategy: Strategy, ranks: Ranks) -> None:
    pair, three = groups(*PAIRS), groups([0, 1, 2], [3])

    def replaced(ddp: Any) -> Callable[[int], None]:
        return lambda step: ddp._update_process_group(three) if step == 1 else None

    with torch._dynamo.config.patch(optimize_ddp=False):
        (ddp,) = towers(ranks, pair)
        expected = trained([ddp], ddp, ranks, replaced(ddp))
    torch._dynamo.reset()
    (ddp,) = towers(ranks, pair)
    step = ddpopt.compile(ddp, backend="aot_eager", strategy=strategy)
    before: list[str] = []

    def between(number: int) -> None:
        plan = imposed_plan(ddp)
        before.append(plan.group if plan else "")
        replaced(ddp)(number)

    gradients = trained([ddp], step, ranks, between)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
    members = [0, 1, 2] if ranks.rank < 3 else [3]
    own = words(PAIRS[ranks.rank % 2], pair)
    assert before == [own, own, words(members, three), words(members, three)]


def test_an_error_names_the_group_of_its_module(ranks: Ranks) -> None:
    pair = groups(*PAIRS)
    (ddp,) = towers(ranks, pair)
    specs = specs_from_ddp(ddp)
    own = [specs[:2], specs[2:]] if ranks.rank < 2 else [specs]
    told = refusal(lambda: ddpopt.impose(ddp, plan_of(own)), PlanMismatchError)
    own_group = words(PAIRS[ranks.rank % 2], pair)
    assert told.startswith(f"ddpopt.impose in group {own_group}: the ranks' plans differ, so nothing")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="ddpopt.train_step needs torch 2.13 or newer")
def test_a_step_follows_its_module_into_another_group(ranks: Ranks) -> None:
    pair, near = groups(*PAIRS), groups(*NEIGHBOURS)
    (ddp,) = towers(ranks, pair)
    step = ddpopt.train_step(lambda x: torch.autograd.backward(ddp(x).square().mean()), backend="aot_eager")
    for group, members in (pair, PAIRS[ranks.rank % 2]), (near, NEIGHBOURS[ranks.rank // 2]):
        ddp._update_process_group(group)
        ddp.zero_grad()
        step(torch.full((2, 8), float(ranks.rank), device=ranks.device))
        gradients = ranks.gather(next(ddp.parameters()).grad)
        alike = [rank for rank in range(4) if torch.equal(gradients[rank], gradients[ranks.rank])]
        assert alike == members
