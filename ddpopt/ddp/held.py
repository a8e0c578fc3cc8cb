"""The parameters that a DDP module's reducer holds, which may differ from those that require grad now.

DDP takes the parameters that require grad when it is built, and keeps no list. Parameters may be frozen,
unfrozen or replaced later; the reducer still waits for exactly those it was built with. So it is queried.

Invariant: the answer is certain, or an error says why there is none; the query changes nothing.

Uses private parts of torch: ``Reducer._get_zeros_like_grad_buckets`` and DDP's log.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddpopt.ddp.state import state_of
from ddpopt.errors import UnsupportedError


def running_reducer(ddp: Any) -> Any:
    """The reducer that a DDP module uses, even while a `ddpopt.ddp.deferral.defer` is pending.

    Args:
        ddp: the DDP module.

    Returns:
        Its ``torch.distributed.Reducer``; None if it has none.
    """
    reducer = getattr(ddp, "reducer", None)  # DDP has none if it has nothing to reduce
    deferral = state_of(ddp).deferral
    return deferral.reducer if deferral is not None and reducer is deferral.placeholder else reducer


def planned_reducer(ddp: Any) -> Any:
    """The reducer that a DDP module uses, if it follows a plan.

    Args:
        ddp: the DDP module.

    Returns:
        Its `ddpopt.ddp.reducer.PlannedReducer`; None if it uses another reducer, or none.
    """
    planned = state_of(ddp).planned
    reducer = running_reducer(ddp)
    return reducer if planned is not None and reducer is not None and planned() is reducer else None


def may_change_in_backward(comm_hooks: Sequence[tuple[Any, Any]]) -> bool:
    """Whether a parameter may change before a backward ends, once its gradient is sent.

    Only a communication hook changes parameters then, if it runs an optimizer; one with the attribute
    ``only_sends = True`` does not. Parameters with hooks of the user's own are never handed over early.

    Args:
        comm_hooks: the DDP module's, each with its state (``ddp._comm_hooks``).
    """
    return not all(getattr(hook, "only_sends", False) for hook, _ in comm_hooks)


@contextlib.contextmanager
def as_built(ddp: Any) -> Iterator[None]:
    """Inside this block exactly the parameters that the module's reducer holds require grad.

    Raises:
        UnsupportedError: its parameters cannot be determined, or are no longer in the module.
    """
    held = {id(parameter) for parameter in held_parameters(ddp)}
    before = [(parameter, parameter.requires_grad) for parameter in ddp.module.parameters()]
    if not all(parameter.is_leaf for parameter, _ in before):
        raise UnsupportedError("parameters are replaced by computed tensors (torch.func.functional_call)")
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in held)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


def held_parameters(ddp: Any) -> list[Tensor]:
    """The parameters that a DDP module's reducer holds (or would hold, if there is none), in no order.

    Raises:
        UnsupportedError: as for `as_built`.
    """
    reducer = running_reducer(ddp)
    planned = planned_reducer(ddp)
    if planned is not None:
        parameters: list[Tensor] = planned.parameters
        return parameters
    if reducer is None:
        return [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
    members = bucket_members(reducer)
    held = _by_the_log(ddp) if members is None else [tensor for bucket in members for tensor in bucket]
    own = {id(parameter) for parameter in ddp.module.parameters()}
    lost = sum(id(parameter) not in own for parameter in held)
    if lost:
        raise UnsupportedError(
            f"the module has lost {lost} of the {len(held)} parameters that DDP was built with: they were "
            "replaced by others, which DDP does not reduce. Build DDP after the last parameter is replaced"
        )
    return held


def numbered_parameters(ddp: Any) -> list[Tensor]:
    """The parameters that a DDP module's reducer holds, in the order of the reducer's numbering.

    DDP numbers them in the module's order when it is built. Layers may have been swapped or pruned since.

    Raises:
        UnsupportedError: as for `as_built`, or the module's order has changed and the numbers are not known.
            They appear in DDP's log after the step that follows the rebuilding of its buckets.
    """
    reducer = running_reducer(ddp)
    held = held_parameters(ddp)
    if planned_reducer(ddp) is not None:
        return held
    place_of = {id(parameter): place for place, parameter in enumerate(ddp.module.parameters())}
    by_place = sorted(held, key=lambda parameter: place_of[id(parameter)])
    members = None if reducer is None else bucket_members(reducer)
    if members is None:
        return by_place
    logged = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if logged:
        numbers = map(int, logged.replace(",", " ").split())
        by_number = dict(zip(numbers, itertools.chain.from_iterable(members), strict=True))
        return [by_number[number] for number in range(len(by_number))]
    if not ddp._has_rebuilt_buckets:
        first_to_last = members[::-1]  # DDP reduces its initial buckets last to first
        kinds = {(parameter.dtype, parameter.device) for parameter in held}
        if len(kinds) == 1 and not any(ddp._build_params_for_reducer()[1]):
            return [*itertools.chain.from_iterable(first_to_last)]
        # buckets of several dtypes, and sparse ones, are interleaved
        places = [[place_of[id(parameter)] for parameter in bucket] for bucket in first_to_last]
        if places == sorted(map(sorted, places)):
            return by_place
    raise UnsupportedError("DDP does not yet say how it numbers the parameters of its buckets")


def bucket_members(reducer: Any) -> list[list[Tensor]] | None:
    """The parameters of each of a reducer's buckets, in the order in which they are reduced.

    Args:
        reducer: must not be queried from inside its communication hook, where it holds its lock.

    Returns:
        None if not available: a sparse gradient's bucket has no tensor before the first backward.
    """
    try:
        with _NoMemory():  # type: ignore[no-untyped-call]  # of torch
            return [bucket.parameters() for bucket in reducer._get_zeros_like_grad_buckets()]
    except RuntimeError as error:
        # The first is said before torch 2.15, the second by 2.15.
        if "undefined Tensor" not in str(error) and "lengths.empty()" not in str(error):
            raise
        return None


class _NoMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Makes zeros that take no memory: the reducer shows its buckets only with zeros for each parameter."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            like: Tensor = args[0]
            return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
        return func(*args, **(kwargs or {}))


def _by_the_log(ddp: Any) -> list[Tensor]:
    """All parameters that require grad, or else all, if they match the count and the size in DDP's log."""
    log = ddp._get_ddp_logging_data()
    counted = log["num_parameter_tensors"], log["total_parameter_size_bytes"]
    ignored = {id(p) for name, p in ddp.module.named_parameters() if name in ddp.parameters_to_ignore}
    trainable = (p for p in ddp.module.parameters() if p.is_floating_point() or p.is_complex())
    every = [parameter for parameter in trainable if id(parameter) not in ignored]
    for held in ([parameter for parameter in every if parameter.requires_grad], every):
        if (len(held), sum(p.numel() * p.element_size() for p in held)) == counted:
            return held
    raise UnsupportedError(
        f"DDP was built with {counted[0]} parameters, some of which have since been frozen or unfrozen; "
        "with sparse gradients it does not tell which until its first backward. Freeze and unfreeze before "
        "building DDP, or after its first step"
    )
