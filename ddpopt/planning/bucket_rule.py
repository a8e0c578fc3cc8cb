"""DDP's bucket rule as pure functions: which gradients travel in which all-reduce, and in which order.

The authority is the reducer that runs (``ddp._get_ddp_logging_data()``) and the function that it calls,
``torch.distributed._compute_bucket_assignment_by_size``; the tests hold this module to both.

Invariant: equal parameters and equal limits give equal buckets, on every rank, process and platform. Nothing
here needs a process group, and nothing here imports torch.distributed.

Source of the rule: ``compute_bucket_assignment_by_size`` and ``Reducer::rebuild_buckets`` in
``torch/csrc/distributed/c10d/reducer.cpp``; ``torch/nn/parallel/distributed.py`` (2.11 to 2.13).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_order import hash_table_order
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.reduced import as_built

__all__ = [
    "BucketConfig",
    "ParamSpec",
    "assign_buckets",
    "initial_buckets",
    "rebuilt_buckets",
    "specs_from_ddp",
    "specs_from_module",
]


@dataclass(frozen=True)
class ParamSpec:
    """What the bucket rule needs to know of one parameter.

    Attributes:
        name: as in ``module.named_parameters()`` of the module inside DDP.
        nbytes: elements times element size, of the parameter and not of its storage.
        dtype: without the prefix: ``"float32"``.
        device: ``"cpu"``, ``"cuda:0"``.
        sparse: whether DDP expects a sparse gradient, which stands in a bucket of its own.
    """

    name: str
    nbytes: int
    dtype: str
    device: str
    sparse: bool = False


def assign_buckets(params: Sequence[ParamSpec], limits: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Fill buckets with parameters in the order given, by DDP's rule.

    A bucket closes after the tensor that brings its size to the limit or above. Each (dtype, device) has
    its own open bucket and walks its own iterator over the limits, whose last entry repeats. A sparse
    gradient is a bucket of its own. The buckets stand in the order in which they close; those that are
    still open at the end follow in the order of torch's hash table, see :mod:`ddpopt.planning.bucket_order`.

    Args:
        params: the parameters, in ready order for rebuilt buckets.
        limits: sizes in bytes at which a bucket closes.

    Returns:
        The buckets in the order in which they are reduced, each a tuple of indices into ``params``.

    Raises:
        UsageError: ``limits`` is empty.
    """
    if not limits:
        raise UsageError(
            "limits: expected at least one size in bytes, got none; use BucketConfig.rebuilt_limits"
        )
    buckets: list[tuple[int, ...]] = []
    open_buckets: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    closed: dict[tuple[str, str], int] = {}
    for index, param in enumerate(params):
        if param.sparse:
            buckets.append((index,))
            continue
        key = (param.dtype, param.device)
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + param.nbytes
        if sizes[key] >= limits[min(closed.get(key, 0), len(limits) - 1)]:
            buckets.append(tuple(open_buckets[key]))
            open_buckets[key], sizes[key] = [], 0
            closed[key] = closed.get(key, 0) + 1
    leftovers = (open_buckets[key] for key in hash_table_order(list(open_buckets)))
    return (*buckets, *(tuple(leftover) for leftover in leftovers if leftover))


def initial_buckets(params: Sequence[ParamSpec], config: BucketConfig) -> tuple[tuple[int, ...], ...]:
    """Buckets of the first iteration (with unused-parameter mode and no static graph: of every iteration).

    Args:
        params: the parameters in the reducer's own order (:func:`specs_from_ddp`).
        config: the limits.

    Returns:
        The buckets in the order in which they are reduced, each a tuple of indices into ``params``.
    """
    buckets = assign_buckets(params, config.initial_limits)
    return tuple(sorted(buckets, key=min, reverse=True))


def rebuilt_buckets(
    params_in_ready_order: Sequence[ParamSpec], config: BucketConfig
) -> tuple[tuple[int, ...], ...]:
    """Buckets after the rebuild: before iteration 2, or before iteration 3 with a static graph.

    Parameters whose gradient never comes are last, in the reducer's own order: only a static graph rebuilds
    in spite of them.

    Args:
        params_in_ready_order: every parameter of the reducer, in the order in which its gradients complete.
        config: the limits; whether DDP rebuilds at all says ``config.rebuilds``.

    Returns:
        The buckets in the order in which they are reduced, each a tuple of indices into the ready order.
    """
    if not config.small_last_bucket:
        return assign_buckets(params_in_ready_order, config.rebuilt_limits)
    last = len(params_in_ready_order) - 1
    buckets = assign_buckets(params_in_ready_order[::-1], config.rebuilt_limits)
    return tuple(tuple(last - index for index in bucket) for bucket in reversed(buckets))


def specs_from_ddp(ddp: nn.parallel.DistributedDataParallel) -> tuple[ParamSpec, ...]:
    """The parameters of a DDP module's reducer, in the reducer's own order, frozen since or not.

    Args:
        ddp: the module.

    Returns:
        One spec for each parameter that DDP reduces; entry i is the parameter that the reducer calls i.

    Raises:
        UnsupportedError: what the reducer holds cannot be told, or is no longer in the module.
    """
    with as_built(ddp):
        return specs_from_module(ddp.module, ignored=ddp.parameters_to_ignore)


def specs_from_module(module: nn.Module, ignored: Iterable[str] = ()) -> tuple[ParamSpec, ...]:
    """The parameters that DDP's reducer would hold for a module, in the order in which it would hold them.

    Frozen and ignored parameters are left out. DDP matches ignored names against
    ``f"{module}.{parameter}"``, once for each module that holds the parameter. So a parameter of the root
    module itself is reduced although its name is ignored (its match is ``".name"``), and a tied parameter is
    left out only if all its names are ignored. The marker ``_ddp_ignored`` alone ignores nothing.

    Args:
        module: what DDP would wrap; its parameters may be meta or fake tensors.
        ignored: names to leave out, beside those in ``module._ddp_params_and_buffers_to_ignore``
            (``ddp.parameters_to_ignore``, names of ``delay_all_reduce_named_params``).

    Returns:
        One spec for each parameter, named as in ``module.named_parameters()``.

    Raises:
        UsageError: ``ignored`` is a single string.
    """
    if isinstance(ignored, str):
        raise UsageError(
            f"ignored: expected a list of parameter names, got the string {ignored!r}; use [{ignored!r}]"
        )
    left_out = frozenset(ignored) | frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return _trainable(module, left_out)


def trainable_specs(module: nn.Module) -> tuple[ParamSpec, ...]:
    """All trainable parameters of a module, those too that DDP is told to leave alone.

    Args:
        module: its parameters may be meta or fake tensors.

    Returns:
        One spec for each parameter, named and ordered as by `specs_from_module`.
    """
    return _trainable(module, frozenset())


def _trainable(module: nn.Module, left_out: frozenset[str]) -> tuple[ParamSpec, ...]:
    names = {id(param): name for name, param in module.named_parameters()}
    specs: dict[int, ParamSpec] = {}
    for qualified_name, owner, param in _owned_parameters(module):
        if param.requires_grad and qualified_name not in left_out:
            specs.setdefault(id(param), _spec(names.get(id(param), qualified_name), owner, param))
    return tuple(specs.values())


def _owned_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for prefix, owner in module.named_modules():
        for name, param in owner.named_parameters(recurse=False):
            yield f"{prefix}.{name}", owner, param


def _spec(name: str, owner: nn.Module, param: nn.Parameter) -> ParamSpec:
    sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and bool(owner.sparse)
    dtype = str(param.dtype).removeprefix("torch.")
    return ParamSpec(name, param.numel() * param.element_size(), dtype, str(param.device), sparse)
