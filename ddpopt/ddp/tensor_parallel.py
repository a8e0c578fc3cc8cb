"""Tensor parallelism under DDP: parameters are local tensors for DDP, and DTensors where a model reads them.

torch's own conversion, which DDP also applies for a slice of a mesh, exchanges parameters in hooks around the
forward. From the first forward on they are missing in ``named_parameters()``, and later steps read the first
one's DTensors: their backward runs through the first step's graph, which compiled code does only once. Here a
parameter stays where it is, and each read of it makes a DTensor; in one graph all reads are the first one.

Invariant: the model reads what it reads with the hooks, and the same local tensors get gradients.

Uses private names of torch: the hooks in ``torch.distributed.tensor.parallel.ddp``, and their ``_st_info``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from ddpopt.errors import UsageError
from ddpopt.graph.nodes import example_value

CONVERSION = "torch.distributed.tensor.parallel.ddp"


def keep_local(model: nn.Module) -> None:
    """Replace the hooks of torch's ``_pre_dp_module_transform`` in a model, if it has any.

    Args:
        model: the module inside DDP. Each of its modules that has converted parameters gets a subclass of its
            class, in which the attributes of these names are DTensors.

    Raises:
        UsageError: the hooks have already replaced parameters.
    """
    parts: list[Any] = [*model.modules()]
    tables = [table for part in parts for table in (part._forward_pre_hooks, part._forward_hooks)]
    found = [(t, k) for t in tables for k, hook in t.items() if getattr(hook, "__module__", "") == CONVERSION]
    if found and any(hasattr(each, "placements") for part in parts for each in vars(part).values()):
        raise UsageError(
            "ddp_model: expected a module that has not run yet, got one in which torch replaced "
            "parameters by DTensors in its first forward; compile it right after DDP is built"
        )
    for part in parts if found else ():
        specs = {name: p._st_info for name, p in part._parameters.items() if hasattr(p, "_st_info")}
        reads = {name: property(_reading(name, spec)) for name, spec in specs.items()}
        own = type(part)
        part.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, **reads}) if reads else own
    for table, key in found:
        del table[key]


def share_reads(gm: fx.GraphModule, example_inputs: Sequence[object]) -> None:
    """Read each parameter once, so that its gradients are summed before ranks exchange them, as in eager.

    Args:
        gm: a graph as Dynamo hands it to a backend; it is changed.
        example_inputs: its inputs.
    """
    given = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    first: dict[Any, fx.Node] = {}
    for node in [user for held, value in given if hasattr(value, "_st_info") for user in held.users]:
        if getattr(node.target, "__name__", "").endswith("from_local"):
            made: Any = example_value(node)
            other = first.setdefault((node.args[0], made.placements, made.requires_grad), node)
            if other is not node:
                node.replace_all_uses_with(other)
                gm.graph.erase_node(node)


def _reading(name: str, spec: Any) -> Callable[[Any], Any]:
    from torch.distributed.tensor import DTensor  # heavy, and needed only here

    def read(part: Any) -> Any:
        local = part._parameters[name]
        return DTensor.from_local(local, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)

    return read
