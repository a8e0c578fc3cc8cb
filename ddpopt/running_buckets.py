"""The buckets that a DDP module's running reducer has, asked of the reducer itself.

Invariant: asking changes nothing and takes no memory to speak of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddpopt.bucket_config import BucketConfig
from ddpopt.deferred import running_reducer
from ddpopt.impose import imposed_plan
from ddpopt.reducer import initial_buckets, specs_from_ddp

__all__ = ["ObservedBucket", "running_buckets"]


@dataclass(frozen=True)
class ObservedBucket:
    """A bucket as the running reducer has it.

    Attributes:
        index: position in the order in which buckets are reduced.
        params: names as in ``module.named_parameters()``, in the order of their places in the bucket.
        nbytes: sum of ``numel * element_size`` over `params`.
        dtype: for instance ``"float32"``.
        device: for instance ``"cpu"`` or ``"cuda:0"``.
        numel: sum of the elements of `params`.
    """

    index: int
    params: tuple[str, ...]
    nbytes: int
    dtype: str
    device: str
    numel: int


def running_buckets(ddp: Any) -> tuple[ObservedBucket, ...]:
    """The buckets in the order in which they are reduced.

    Args:
        ddp: the DDP module. Not to be called from inside its backward, which may hold the reducer's lock.

    Returns:
        The buckets that its next backward would reduce, unless its next forward rebuilds them.
    """
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    members = _members(ddp, running_reducer(ddp))
    return tuple(
        _observed(index, [(names[id(parameter)], parameter) for parameter in bucket])
        for index, bucket in enumerate(members)
    )


def _observed(index: int, bucket: Sequence[tuple[str, Tensor]]) -> ObservedBucket:
    parameters = [parameter for _, parameter in bucket]
    return ObservedBucket(
        index=index,
        params=tuple(name for name, _ in bucket),
        nbytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        device=str(parameters[0].device),
        numel=sum(parameter.numel() for parameter in parameters),
    )


class _NoMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Gives zeros that take no memory: the reducer shows its buckets only with a tensor of zeros for each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.zeros_like.default:
            like: Tensor = args[0]
            return torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
        return func(*args, **(kwargs or {}))


def _members(ddp: Any, reducer: Any) -> list[list[Tensor]]:
    try:
        with _NoMemory():  # type: ignore[no-untyped-call]  # of torch
            return [bucket.parameters() for bucket in reducer._get_zeros_like_grad_buckets()]
    except RuntimeError:
        # A bucket of a sparse gradient has no tensor before the first backward, hence before any rebuild.
        specs = specs_from_ddp(ddp)
        if not any(spec.sparse for spec in specs):
            raise
        plan = imposed_plan(ddp)
        parameters = dict(ddp.module.named_parameters())
        if plan is not None:
            return [[parameters[name] for name in bucket.params] for bucket in plan.buckets]
        buckets = initial_buckets(specs, BucketConfig.from_ddp(ddp))
        return [[parameters[specs[index].name] for index in bucket] for bucket in buckets]
