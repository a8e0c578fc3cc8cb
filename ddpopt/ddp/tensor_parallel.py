"""Tensor parallelism under DDP: parameters are local tensors for DDP, and DTensors where the model reads them.

torch's own conversion, which DDP also applies for a slice of a mesh, exchanges parameters in hooks around the
forward. From the first forward on they are missing in ``named_parameters()``, and later steps read the first
one's DTensors: their backward runs through the first step's graph, which compiled code does only once. Here a
parameter stays where it is, and each read of it makes a DTensor.

Invariant: the model reads what it reads with the hooks, and the same local tensors get gradients.

Uses private names of torch: the hooks in ``torch.distributed.tensor.parallel.ddp``, and their ``_st_info``.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

CONVERSION = "torch.distributed.tensor.parallel.ddp"


def keep_local(model: nn.Module) -> None:
    """Replace the hooks of torch's ``_pre_dp_module_transform`` in a model, if it has any.

    Args:
        model: the module inside DDP, before its first forward. Each of its modules that has converted
            parameters gets a subclass of its class, in which the attributes of these names are DTensors.
    """
    part: Any
    for part in model.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == CONVERSION]:
                del hooks[key]
        sharded = {name: p._st_info for name, p in part._parameters.items() if hasattr(p, "_st_info")}
        if sharded:
            reads = {name: property(_reading(name, spec)) for name, spec in sharded.items()}
            own = type(part)
            part.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, **reads})


def _reading(name: str, spec: Any) -> Callable[[Any], Any]:
    from torch.distributed.tensor import DTensor  # heavy, and needed only here

    def read(part: Any) -> Any:
        local, shape, stride = part._parameters[name], spec.shape, spec.stride
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
        )

    return read
