"""A case's plan, made on fake tensors as `ddpopt.plan` makes it.

Invariant: equal on every rank, for it is made from the inputs of rank 0's first step.
"""

from __future__ import annotations

import torch

from ddpopt.cases.case import Case
from ddpopt.gate.figures import BucketRow, PlanFigures
from ddpopt.planning.capture import capture


def plan_figures(case: Case) -> PlanFigures:
    """Plan a case.

    Args:
        case: the case, with DDP's arguments of its own.

    Returns:
        What the gate keeps of its plan.

    Raises:
        UsageError: the model cannot be traced.
    """
    args, kwargs = case.inputs(0, 0)
    with torch.enable_grad():
        plan = capture(case.model(), *args, strategy="split", **kwargs, **case.ddp_kwargs).plan()
    rows = tuple(BucketRow(bucket.params, bucket.nbytes, bucket.dtype) for bucket in plan.buckets)
    return PlanFigures(plan.fingerprint, len(plan.segments), rows, plan.unread)
