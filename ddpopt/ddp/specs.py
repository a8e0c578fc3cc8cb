"""What planning needs to know of a DDP module: the parameters that its reducer holds, and its bucket limits.

Invariant: reading them changes nothing. What DDP would reduce for a module that it does not wrap yet is here,
too, so that both answers come from one rule.

Source: ``torch/nn/parallel/distributed.py``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.held import as_built, planned_reducer
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.limits import BucketConfig, default_first_bucket_bytes, last_bucket_is_small


def limits_of(ddp: DistributedDataParallel) -> BucketConfig:
    """Read the limits that a DDP module uses.

    Args:
        ddp: the module; the current ``static_graph`` is read, so call this after ``_set_static_graph``.

    Returns:
        Its configuration.
    """
    return BucketConfig(
        cap_bytes=int(ddp.bucket_bytes_cap),
        first_bucket_bytes=_first_bucket_bytes(ddp),
        cap_bytes_list=tuple(map(int, ddp.bucket_bytes_cap_list)),
        find_unused_parameters=bool(ddp.find_unused_parameters),
        static_graph=bool(ddp.static_graph),
        small_last_bucket=last_bucket_is_small(),
    )


def _first_bucket_bytes(ddp: DistributedDataParallel) -> int:
    # Private names of DDP, here and above. torch 2.11 has no _bucket_config.
    if hasattr(ddp, "_bucket_config"):
        return int(ddp._bucket_config.first_bucket_bytes_cap)
    return default_first_bucket_bytes() if ddp.bucket_bytes_cap_default else int(ddp.bucket_bytes_cap)


def specs_by_id(ddp: DistributedDataParallel) -> dict[int, ParamSpec]:
    """The parameters that `ddp` reduces, by ``id`` of the parameter, in the order of the reducer's list.

    A reducer that follows a plan keeps the plan's names, even if the module's parameter names have changed.
    """
    reducer = planned_reducer(ddp)
    planned: Mapping[int, str] = {} if reducer is None else reducer.names
    ids = {name: id(param) for name, param in ddp.module.named_parameters()}
    by_id = {ids[spec.name]: spec for spec in specs_from_ddp(ddp)}
    return {key: replace(spec, name=planned.get(key, spec.name)) for key, spec in by_id.items()}


def specs_from_ddp(ddp: DistributedDataParallel) -> tuple[ParamSpec, ...]:
    """The parameters of a DDP module's reducer, in the reducer's own order, even if frozen since.

    Args:
        ddp: the module.

    Returns:
        One spec for each parameter that DDP reduces; entry i is the reducer's parameter number i.

    Raises:
        UnsupportedError: the reducer's parameters cannot be determined, or are no longer in the module.
    """
    with as_built(ddp):
        return specs_from_module(ddp.module, ignored=ddp.parameters_to_ignore)


def specs_from_module(module: nn.Module, ignored: Iterable[str] = ()) -> tuple[ParamSpec, ...]:
    """The parameters that DDP's reducer would hold for a module, in the reducer's order.

    Frozen and ignored parameters are left out. DDP matches ignored names against
    ``f"{module}.{parameter}"``, once for each module that holds the parameter. So a parameter of the root
    module itself is reduced although its name is ignored (it is matched as ``".name"``), and a tied parameter
    is left out only if all its names are ignored. The marker ``_ddp_ignored`` alone has no effect.

    Args:
        module: the module that DDP would wrap; its parameters may be meta or fake tensors.
        ignored: names to leave out, in addition to those in ``module._ddp_params_and_buffers_to_ignore``
            (``ddp.parameters_to_ignore``, names of ``delay_all_reduce_named_params``).

    Returns:
        One spec for each parameter, named as in ``module.named_parameters()``.
    """
    left_out = frozenset(ignored) | frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = {id(param): name for name, param in module.named_parameters()}
    specs: dict[int, ParamSpec] = {}
    for prefix, owner in module.named_modules():
        for own_name, param in owner.named_parameters(recurse=False):
            if param.requires_grad and f"{prefix}.{own_name}" not in left_out:
                name = names.get(id(param), f"{prefix}.{own_name}")
                sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and bool(owner.sparse)
                specs.setdefault(id(param), ParamSpec.of(name, param, sparse=sparse))
    return tuple(specs.values())
