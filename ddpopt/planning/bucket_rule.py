"""DDP's bucket rule: which gradients are reduced in which all-reduce, and in which order.

The rule is torch's own function, ``torch.distributed._compute_bucket_assignment_by_size``, called as DDP and
its reducer call it, on fake tensors.

Invariant: equal parameters and equal limits give equal buckets, on every rank and in every process. Nothing
here needs a process group.

Source: ``Reducer::rebuild_buckets`` in ``torch/csrc/distributed/c10d/reducer.cpp``, and
``torch/nn/parallel/distributed.py``.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ddpopt.planning.limits import BucketConfig


@dataclass(frozen=True)
class ParamSpec:
    """What the bucket rule needs to know about one parameter.

    Attributes:
        name: as in ``module.named_parameters()`` of the module inside DDP.
        nbytes: number of elements times element size, of the parameter and not of its storage.
        dtype: without the prefix, for instance ``"float32"``.
        device: for instance ``"cpu"`` or ``"cuda:0"``.
        sparse: whether DDP expects a sparse gradient, which gets its own bucket.
    """

    name: str
    nbytes: int
    dtype: str
    device: str
    sparse: bool = False

    @classmethod
    def of(cls, name: str, param: torch.Tensor, *, sparse: bool = False) -> "ParamSpec":
        """Describe a parameter under a name."""
        dtype = str(param.dtype).removeprefix("torch.")
        return cls(name, param.numel() * param.element_size(), dtype, str(param.device), sparse)


Specs = Mapping[int, ParamSpec]
"""The parameters that DDP reduces, by ``id`` of the parameter, in the order of the reducer's list."""


def assign_buckets(params: Sequence[ParamSpec], limits: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Fill buckets with parameters in the order given, by DDP's rule.

    A bucket closes after the tensor that brings its size to the limit or above. Each (dtype, device) has
    its own open bucket and its own iterator over the limits, whose last entry repeats. A sparse gradient
    gets its own bucket. The buckets are in the order in which they close; those still open at the end
    follow in the order of torch's hash table.

    Args:
        params: the parameters, in ready order for rebuilt buckets.
        limits: sizes in bytes at which a bucket closes, at least one.

    Returns:
        The buckets in the order in which they are reduced: indices into ``params``, and the limit at which
        the bucket closes (0 for a sparse gradient).
    """
    if not params:
        return []
    mode = FakeTensorMode()

    @functools.cache
    def tensor(nbytes: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        meta = torch.empty(nbytes // dtype.itemsize, dtype=dtype, device="meta")
        return FakeTensor(mode, meta, torch.device(device))

    by_torch: Any = torch.distributed
    tensors = [tensor(spec.nbytes, getattr(torch, spec.dtype), spec.device) for spec in params]
    others = [*limits], [spec.sparse for spec in params], [*range(len(params))]
    buckets, closing = by_torch._compute_bucket_assignment_by_size(tensors, *others)
    return [(tuple(members), limit) for members, limit in zip(buckets, closing, strict=True)]


def initial_buckets(params: Sequence[ParamSpec], config: BucketConfig) -> tuple[tuple[int, ...], ...]:
    """Buckets of the first iteration; of every iteration in unused-parameter mode without a static graph.

    Args:
        params: the parameters in the reducer's own order (:func:`specs_from_ddp`).
        config: the limits.

    Returns:
        The buckets in the order in which they are reduced, each a tuple of indices into ``params``.
    """
    buckets = (members for members, _ in assign_buckets(params, config.initial_limits))
    return tuple(sorted(buckets, key=min, reverse=True))


def rebuilt_buckets(ready: Sequence[ParamSpec], config: BucketConfig) -> tuple[tuple[int, ...], ...]:
    """Buckets after the rebuild: before iteration 2, or before iteration 3 with a static graph.

    Parameters that never get a gradient come last, in the reducer's own order: only a static graph rebuilds
    despite such parameters.

    Args:
        ready: every parameter of the reducer, in ready order.
        config: the limits; ``config.rebuilds`` says whether DDP rebuilds at all.

    Returns:
        The buckets in the order in which they are reduced, each a tuple of indices into the ready order.
    """
    return tuple(members for members, _ in _rebuilt(ready, config))


def own_buckets(
    own: Sequence[ParamSpec], ready: Sequence[ParamSpec], config: BucketConfig
) -> list[list[ParamSpec]]:
    """DDP's own buckets: rebuilt from the ready order if it rebuilds them, else those of its own order."""
    order, rule = (ready, rebuilt_buckets) if config.rebuilds else (own, initial_buckets)
    return [[order[place] for place in members] for members in rule(order, config)]


def _rebuilt(ready: Sequence[ParamSpec], config: BucketConfig) -> list[tuple[tuple[int, ...], int]]:
    if not config.small_last_bucket:
        return assign_buckets(ready, config.rebuilt_limits)
    last = len(ready) - 1
    buckets = assign_buckets(ready[::-1], config.rebuilt_limits)
    return [(tuple(last - index for index in members), limit) for members, limit in reversed(buckets)]


def ready_buckets(ready: Sequence[ParamSpec], config: BucketConfig) -> list[tuple[tuple[int, ...], str]]:
    """Like `rebuilt_buckets`, but ordered by when the last gradient is ready, and with each bucket's reason.

    DDP appends the buckets still open at the end; in this order no bucket waits for one that is ready later.
    """
    buckets = sorted(_rebuilt(ready, config), key=lambda bucket: max(bucket[0]))
    return [(members, closing_reason([ready[i] for i in members], limit)) for members, limit in buckets]


def closing_reason(specs: Sequence[ParamSpec], limit: int) -> str:
    """Why a bucket of these parameters, in ready order, closes under a limit in bytes."""
    nbytes = sum(spec.nbytes for spec in specs)
    last = specs[-1]
    if last.sparse:
        return f"{last.name} has a sparse gradient and is sent alone"
    if nbytes < limit:
        return "no gradient is left to add"
    return f"{last.name} brings it to {nbytes} bytes, at or over the limit of {limit}"
