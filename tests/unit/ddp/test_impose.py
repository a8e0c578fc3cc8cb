"""ddpopt.impose in one process: what changes in the module, and what does not."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpopt.ddp.deferral import defer
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.errors import PlanMismatchError, UsageError
from ddpopt.planning.plan import Plan
from tests.support.models import arbitrary_plan, gradients_of, same, step, towers

pytestmark = pytest.mark.usefixtures("one_rank_group")
c10d: Any = dist  # torch does not mark its re-exports


def test_a_plan_that_does_not_fit_or_comes_at_a_bad_moment_changes_nothing() -> None:
    ddp = towers()
    plan, before = arbitrary_plan(ddp, 1), (ddp.reducer, ddp.logger)
    with pytest.raises(PlanMismatchError):
        impose(ddp, Plan((), (), ()))
    output = ddp(torch.ones(2, 6)).sum()
    with pytest.raises(UsageError):
        impose(ddp, plan)
    assert (ddp.reducer, ddp.logger, imposed_plan(ddp)) == (*before, None)
    torch.autograd.backward(output)
    impose(ddp, plan)
    assert imposed_plan(ddp) == plan


@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}])
@pytest.mark.parametrize("give", [impose, lambda ddp, plan: defer(ddp, lambda: plan)], ids=["now", "later"])
def test_copies_and_pickles_have_ddps_own_buckets_again(give: Any, arguments: dict[str, Any]) -> None:
    ddp = towers(**arguments)
    give(ddp, plan := arbitrary_plan(ddp, 1))
    for copied in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert isinstance(copied.reducer, c10d.Reducer)
        assert isinstance(copied.logger, c10d.Logger)
        step(copied)
        assert imposed_plan(copied) is None
    step(ddp)
    assert imposed_plan(ddp) == plan


def test_gradients_that_are_views_of_the_old_buckets_keep_their_values() -> None:
    ddp = towers(gradient_as_bucket_view=True)
    step(ddp)
    before = gradients_of(ddp)
    impose(ddp, arbitrary_plan(ddp, 1))
    assert same([gradients_of(ddp)], [before])
    ddp.zero_grad(set_to_none=False)
    step(ddp)
    assert same([gradients_of(ddp)], [before])
