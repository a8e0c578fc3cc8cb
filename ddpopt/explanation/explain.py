"""Explain a model without training it: ddpopt's plan, DDP's own buckets, and torch's DDPOptimizer.

Everything is predicted on fake tensors, without a process group, an accelerator or a copy of the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ddpopt.cases.case import Case
from ddpopt.ddp.state import state_of
from ddpopt.dynamo.capture import Capture, capture
from ddpopt.explanation.rehearsal import Rehearsal, RehearsedStep, call, generators_kept, sum_of_squares
from ddpopt.explanation.result import Explanation, OwnBucket, OwnBuckets, TorchSegment, TorchSplit
from ddpopt.explanation.torch_split import run_torch_split
from ddpopt.planning.bucket_rule import own_buckets
from ddpopt.planning.limits import DDP_ARGUMENTS
from ddpopt.planning.plan import Plan, Strategy


def explain(model: nn.Module, *inputs: Any, strategy: Strategy = "auto", **kwargs: Any) -> Explanation:
    """Explain a model's buckets and cuts, side by side with DDP's own buckets and torch's DDPOptimizer.

    Args:
        model: a module, or a DDP module, whose own bucket options then apply. If a `ddpopt.train_step`
            trains it, the plan is that step's. Parameters may be real, fake or on the meta device.
        inputs: the positional arguments of its forward.
        strategy: as for `ddpopt.compile`.
        kwargs: DDP's own arguments (``bucket_cap_mb=25``, ``bucket_cap_mb_list``,
            ``find_unused_parameters``, ``static_graph``, …); everything else goes to the model's forward.

    Returns:
        The explanation; its ``str()`` is the table that ``ddpopt explain`` prints. Its ready order is that
        of a loss that sums the squares of all outputs. torch's optimizer runs on a backend that compiles
        nothing, so failures of a real backend are not shown.

    Raises:
        UsageError: an argument cannot be used, or the model cannot be traced.
    """
    captured = capture(model, *inputs, strategy=strategy, **kwargs)
    forward_kwargs = {key: value for key, value in kwargs.items() if key not in DDP_ARGUMENTS}
    inner: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    explained = _explain(captured, RehearsedStep(inner, inputs, forward_kwargs, sum_of_squares))
    trained = state_of(model).step_plan if isinstance(model, nn.parallel.DistributedDataParallel) else None
    return replace(explained, plan=trained, inline=True) if trained else explained


def explain_case(case: Case, ddp_kwargs: Mapping[str, Any], strategy: Strategy = "auto") -> Explanation:
    """Explain a case with its own loss, and the inputs of rank 0's first step.

    Args:
        case: the case.
        ddp_kwargs: DDP's arguments, instead of the case's own.
        strategy: as for `ddpopt.compile`.

    Returns:
        The explanation.

    Raises:
        UsageError: an argument cannot be used, or the model cannot be traced.
    """
    with generators_kept():
        model = case.model()
        args, kwargs = case.inputs(0, 0)
        captured = capture(model, *args, strategy=strategy, **kwargs, **ddp_kwargs)
        return _explain(captured, RehearsedStep(model, args, kwargs, case.loss))


def _explain(captured: Capture, step: RehearsedStep) -> Explanation:
    plan = captured.plan
    model = getattr(step.model, "_orig_mod", step.model)
    return Explanation(
        model=type(model).__name__,
        config=captured.config,
        plan=plan,
        inline=all(captured.graphs[index].inline for index in captured.planned),
        ddp=_own_buckets(captured, plan, step),
        torch=_torch_split(captured, step),
    )


def _own_buckets(captured: Capture, plan: Plan, step: RehearsedStep) -> OwnBuckets:
    note = ""
    with Rehearsal.of(step, captured.specs) as rehearsal:
        try:
            order = rehearsal.ready_order(call)
        except Exception as error:  # the plan exists, so show the rest
            order = tuple(name for bucket in plan.buckets for name in bucket.params)
            note = f"ready order taken from ddpopt's plan: eager backward fails on fake tensors ({error})"
    return OwnBuckets(_fill(captured, order, ()), captured.config.rebuilds, note)


def _fill(
    captured: Capture, ready_order: Sequence[str], segments: Sequence[TorchSegment]
) -> tuple[OwnBucket, ...]:
    """The buckets that DDP fills if gradients complete in this order, in these segments."""
    by_name = {spec.name: spec for spec in captured.specs}
    # a gradient that never comes is assumed to come last
    ready = [*(by_name.pop(name) for name in ready_order), *by_name.values()]
    completes_in = {name: segment.index for segment in segments for name in segment.params}
    filled = []
    for index, specs in enumerate(own_buckets(captured.specs, ready, captured.config)):
        waits_on = sorted({completes_in[spec.name] for spec in specs if spec.name in completes_in})
        filled.append(OwnBucket.of(index, specs, tuple(waits_on)))
    return tuple(filled)


def _torch_split(captured: Capture, step: RehearsedStep) -> TorchSplit:
    with Rehearsal.of(step, captured.specs) as rehearsal:
        split, order = run_torch_split(rehearsal, captured.config.cap_bytes)
    return replace(split, buckets=_fill(captured, order, split.segments)) if order else split
