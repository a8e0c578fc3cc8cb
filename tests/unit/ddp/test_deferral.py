"""ddpopt.ddp.deferral: a reducer that waits for the end of a forward, of which nothing is left."""

import weakref
from typing import Any

import pytest
import torch

from ddpopt.ddp.deferral import PendingReducer, defer, pending
from ddpopt.ddp.held import running_reducer
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.errors import PlanMismatchError
from ddpopt.planning.plan import Plan
from ddpopt.strategies.quiet import gc_paused
from tests.support.models import arbitrary_plan, step, towers

pytestmark = pytest.mark.usefixtures("one_rank_group")


def forward(ddp: Any) -> Any:
    return ddp(torch.ones(2, 6)).sum()


def is_pending(ddp: Any) -> bool:
    return isinstance(ddp.reducer, PendingReducer) or pending(ddp) is not None


def test_the_plan_is_asked_for_once_at_the_end_of_the_first_synchronized_forward() -> None:
    ddp = towers()
    plan = arbitrary_plan(ddp, 1)
    asked: list[int] = []

    def decide() -> Plan:
        asked.append(len(asked))
        return plan

    defer(ddp, decide)
    with ddp.no_sync():
        step(ddp)
    with torch.no_grad():
        forward(ddp)
    with pytest.raises(RuntimeError):
        ddp(torch.ones(2, 5))  # a forward that raises leaves the decision to the next one
    assert (asked, imposed_plan(ddp)) == ([], None)
    output = forward(ddp)
    assert (asked, imposed_plan(ddp)) == ([0], plan)
    torch.autograd.backward(output)
    step(ddp)
    assert asked == [0]
    assert not is_pending(ddp)


def test_the_last_call_counts() -> None:
    for last in (lambda ddp, plan: defer(ddp, lambda: plan), impose):
        ddp = towers()
        first, second = arbitrary_plan(ddp, 1), arbitrary_plan(ddp, 2)
        defer(ddp, lambda first=first: first)  # type: ignore[misc]  # bound now
        last(ddp, second)
        step(ddp)
        assert imposed_plan(ddp) == second
        assert not is_pending(ddp)


def test_when_the_plan_does_not_fit_the_forward_raises_and_the_module_has_its_own_reducer() -> None:
    ddp = towers()
    own = ddp.reducer, ddp.logger
    defer(ddp, lambda: Plan((), (), ()))
    with pytest.raises(PlanMismatchError):
        forward(ddp)
    assert (ddp.reducer, ddp.logger) == own
    step(ddp)


def test_a_parameter_that_was_replaced_and_frozen_after_a_plan_was_imposed_is_named() -> None:
    ddp = towers(find_unused_parameters=True)
    plan = arbitrary_plan(ddp, 1)
    impose(ddp, plan)
    step(ddp)
    layer = next(module for module in ddp.module.modules() if isinstance(module, torch.nn.Linear))
    layer.weight.requires_grad_(False)
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    defer(ddp, lambda: plan)
    with pytest.raises(PlanMismatchError):
        forward(ddp)
    assert not is_pending(ddp)


@gc_paused()
def test_a_waiting_module_is_freed_without_the_garbage_collector() -> None:
    ddp = towers()
    defer(ddp, lambda: None)
    gone = weakref.ref(ddp)
    del ddp
    assert gone() is None


def test_ddps_log_can_be_read_while_waiting() -> None:
    ddp = towers()
    before = ddp._get_ddp_logging_data()
    defer(ddp, lambda: None)
    assert ddp._get_ddp_logging_data() == before
    assert running_reducer(ddp) is running_reducer(ddp)
