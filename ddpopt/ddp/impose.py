"""Making a DDP module's reducer use a plan's buckets, from the first iteration on.

Use :func:`impose` for a plan that is known, and `ddpopt.ddp.deferral` for one that will be known after the
first forward.

Invariant: on every rank the buckets are those of one plan, or nothing has changed and an error says why.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import nn

from ddpopt.ddp.agreement import exchange_plans, group_name, in_group, plan_difference, same_buckets
from ddpopt.ddp.deferral import ended_deferral
from ddpopt.ddp.fit import ddp_module, ddp_within, require_between_iterations, require_fit
from ddpopt.ddp.held import planned_reducer
from ddpopt.ddp.reducer import install
from ddpopt.errors import PlanMismatchError
from ddpopt.planning.plan import Plan

IMPOSE = "ddpopt.impose"


def impose(ddp: nn.Module, plan: Plan, *, timeout: timedelta = timedelta(seconds=30)) -> None:
    """Make a DDP module reduce exactly ``plan.buckets``, in their order, from its next iteration on.

    Every rank of the module's process group must call this, with a plan that has the same buckets. Call it
    before training or between two iterations. Gradients, ``state_dict`` and communication hooks are kept;
    a copy or a pickle of the module has DDP's own buckets again.

    Args:
        ddp: the DDP module, or a module that contains it.
        plan: holds each trainable parameter once; only its buckets are used.
        timeout: how long to wait for the other ranks.

    Raises:
        UsageError: ``ddp`` is not a DDP module, has an option that leaves no buckets to plan, or is between a
            forward and its backward.
        PlanMismatchError: the plan does not fit the module, or the ranks' plans differ. The message shows
            every difference, on every rank.
        InfrastructureError: a rank did not make this call in time.
    """
    impose_decided(ddp, lambda: plan, timeout)


def impose_decided(ddp: nn.Module, decide: Callable[[], Plan], timeout: timedelta) -> None:
    """Like `impose`, with a plan that each rank finds only now; if `decide` raises on one, all raise."""
    module = ddp_module(ddp)

    def checked_plan() -> Plan:
        plan = decide()
        require_between_iterations(module)
        require_fit(module, plan)
        return plan

    plans: Any = exchange_plans(module.process_group, IMPOSE, checked_plan, timeout)
    if not same_buckets(plans):
        raise PlanMismatchError(
            f"{in_group(IMPOSE, module.process_group)}: the ranks' plans differ, so nothing was changed:\n"
            f"{plan_difference(plans)}\n"
            "Make the plan from the same model and the same arguments on every rank, or make it on one rank "
            "and send its to_json() to the others"
        )
    with ended_deferral(module):
        install(module, plans[module.process_group.rank()])


def imposed_plan(ddp: nn.Module) -> Plan | None:
    """The plan whose buckets a DDP module uses.

    Args:
        ddp: the DDP module, or a module that contains it.

    Returns:
        The plan, with the name of the module's process group; None if the module uses DDP's own buckets.
    """
    module: Any = ddp_within(ddp)
    reducer = planned_reducer(module)
    if reducer is None:
        return None
    plan: Plan = reducer.plan
    return replace(plan, group=group_name(module.process_group))
