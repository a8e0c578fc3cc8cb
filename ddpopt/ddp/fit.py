"""Checks that a plan's buckets can be given to a DDP module, before anything changes.

The reducer's constructor accepts parameters that appear twice or not at all, and fails much later.

Invariant: nothing is changed here, and an error shows every problem, not only the first.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.engine import NO_TASK, task_id
from ddpopt.ddp.runtime_log import log_of_this_iteration
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import PlanMismatchError, UnsupportedError, UsageError, numbered
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Bucket, Plan

SHOWN_PROBLEMS = 20


def ddp_within(module: Any) -> DistributedDataParallel:
    """The DDP module that was passed, or the only one within it: in a framework's wrapper, or compiled.

    Raises:
        UsageError: there is none, or more than one that is not inside another.
    """
    modules = module.named_modules(prefix="model") if isinstance(module, nn.Module) else ()
    found = {name: inner for name, inner in modules if isinstance(inner, DistributedDataParallel)}
    outermost = [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]
    if len(outermost) == 1:
        return found[outermost[0]]
    several = f", which contains {len(outermost)}, {' and '.join(outermost)}: pass one of them"
    none = '; wrap the model first. Where a framework wraps it later: model.compile(backend="ddpopt")'
    got = f"got {type(module).__name__}{several if outermost else none}"
    raise UsageError(f"expected a DistributedDataParallel module, {got}")


def ddp_module(module: nn.Module) -> DistributedDataParallel:
    """The DDP module that was passed or is within it, if its reducer can be replaced.

    Args:
        module: the user's argument.

    Returns:
        The DDP module.

    Raises:
        UsageError: there is no DDP module, or more than one.
        UnsupportedError: it does not reduce through its own reducer.
    """
    inner = ddp_within(module)
    refused = [f"  - {reason}" for reason in _unsupported(inner)]
    if refused:
        raise UnsupportedError("\n".join(["this DDP module's buckets cannot be planned:", *refused]))
    return inner


def require_compilable(ddp: Any) -> None:
    """Check that a compiled backward does what DDP's own hooks expect of one.

    Args:
        ddp: the DDP module.

    Raises:
        UnsupportedError: a hook of DDP's reads gradients when that of another parameter is ready. Compiled
            code delivers gradients in an order of its own, so they may not have been accumulated by then.
    """
    if ddp._delay_all_reduce_params:
        raise UnsupportedError(
            "delay_all_reduce_named_params: DDP sends these gradients when that of param_to_hook_all_reduce "
            "is ready, and a compiled backward may deliver them later, so that ranks would train with "
            "gradients of their own. Leave it out, or do not compile this module"
        )


def _unsupported(ddp: Any) -> Iterator[str]:
    if ddp._use_python_reducer:
        yield (
            "it was built under torch._dynamo.config.optimize_ddp='python_reducer', which reduces "
            "without buckets; set another value before building it"
        )
    if ddp._delay_all_reduce_all_params:
        yield (
            "delay_all_reduce_named_params contains all of its parameters, so none are left for buckets; "
            "leave some out"
        )
    if ddp.mixed_precision is not None:
        yield "mixed_precision ties its hooks to DDP's original buckets; use torch.autocast instead"


def require_between_iterations(ddp: DistributedDataParallel) -> None:
    """Check that no forward or backward of the module is in progress, whose gradients would be lost.

    Args:
        ddp: the module.

    Raises:
        UsageError: one is in progress; the message says what to do first.
    """
    if problem := _under_way(ddp):
        raise UsageError(f"the buckets cannot change now: {problem}")


def _under_way(ddp: Any) -> str:
    if task_id() != NO_TASK:
        return "a backward is running; call this before or after it"
    if DistributedDataParallel._active_ddp_module is ddp:
        return "the module's forward is running; call this before or after it"
    if _awaits_backward(ddp):
        return (
            "a synchronized forward still needs its backward; run it first, or run forwards that need none "
            "under torch.no_grad(). A static graph's buckets can only be set before its first forward"
        )
    return ACCUMULATES if accumulates(ddp) else ""


ACCUMULATES = (
    "under no_sync() the reducer records which parameters were used, and a new reducer would not know; "
    "call this before the first accumulated backward, or after zero_grad()"
)


def accumulates(ddp: Any) -> bool:
    """Whether the reducer has recorded used parameters since the last synchronized backward."""
    notes = ddp.find_unused_parameters and not ddp.static_graph and not ddp.require_forward_param_sync
    return notes and any(parameter.grad is not None for parameter in ddp.module.parameters())


def _awaits_backward(ddp: Any) -> bool:
    # DDP has no such flag, but its log counts the buckets reduced since the last forward.
    log = log_of_this_iteration(ddp)
    # A static graph's first backward is reduced by a node that only forwards before it have.
    return bool(log.get("iteration") and (ddp.static_graph or not log.get("num_buckets_reduced")))


def require_fit(ddp: DistributedDataParallel, plan: Plan) -> None:
    """Check that a plan's buckets hold each parameter of a module's reducer once, and can be reduced.

    Args:
        ddp: the module.
        plan: the plan.

    Raises:
        PlanMismatchError: they do not; the message lists every bucket and parameter that is wrong.
    """
    problems = list(_problems(ddp, plan))
    if not problems:
        return
    lines = [f"  - {problem}" for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"  - and {len(problems) - SHOWN_PROBLEMS} more")
    raise PlanMismatchError(
        f"the plan does not fit the DDP module, {len(problems)} problem(s):\n" + "\n".join(lines) + "\n"
        "Nothing was changed. Make the plan from this module: ddpopt.plan(ddp_module, *inputs)"
    )


def _problems(ddp: DistributedDataParallel, plan: Plan) -> Iterator[str]:
    specs = {spec.name: spec for spec in specs_from_ddp(ddp)}
    planned = Counter(name for bucket in plan.buckets for name in bucket.params)
    for name, count in planned.items():
        if name not in specs:
            yield f"{_places(plan, name)}: {name!r} is {_what_it_is(ddp, name)}"
        if count > 1:
            yield f"{name!r} appears {count} times, in {_places(plan, name)}"
    yield from (f"{name!r} is missing from every bucket" for name in specs if name not in planned)
    for bucket in plan.buckets:
        yield from _bucket_problems(bucket, [specs[name] for name in bucket.params if name in specs])


def _places(plan: Plan, name: str) -> str:
    return numbered("bucket", [place for place, bucket in enumerate(plan.buckets) if name in bucket.params])


def _what_it_is(ddp: Any, name: str) -> str:
    known = dict(ddp.module.named_parameters(remove_duplicate=False))
    if name not in known:
        return "not a parameter of the module"
    if not known[name].requires_grad:
        return "frozen, so DDP does not reduce it"
    first = next(first for first, parameter in ddp.module.named_parameters() if parameter is known[name])
    if first != name:
        return f"another name of {first!r}; use that one"
    return "ignored by DDP (parameters_to_ignore)"


def _bucket_problems(bucket: Bucket, specs: list[ParamSpec]) -> Iterator[str]:
    place = f"bucket {bucket.index}"
    if not bucket.params:
        yield f"{place} is empty"
    kinds = {f"{spec.dtype} on {spec.device}": spec.name for spec in specs}
    if len(kinds) > 1:
        yield f"{place} mixes " + " with ".join(f"{kind} ({name!r})" for kind, name in kinds.items())
    if len(bucket.params) > 1:
        sparse = (spec.name for spec in specs if spec.sparse)
        yield from (f"{place} holds {name!r} and others, but its gradient is sparse" for name in sparse)
    if len(specs) == len(bucket.params) and len(kinds) == 1:
        nbytes = sum(spec.nbytes for spec in specs)
        dtype = specs[0].dtype
        if (nbytes, dtype) != (bucket.nbytes, bucket.dtype):
            yield (
                f"{place} is planned as {bucket.nbytes} bytes of {bucket.dtype}, but its parameters are "
                f"{nbytes} bytes of {dtype}"
            )
