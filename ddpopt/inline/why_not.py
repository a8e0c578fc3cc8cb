"""Why a graph cannot be compiled inline; it is split instead.

Invariant: for the same graph, `ddpopt.plan` and compilation give the same answer.
"""

from torch import fx
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ddpopt.graph.effects import communicates_in_backward, is_known, written_storages
from ddpopt.graph.nodes import example_value, storages
from ddpopt.planning.facts import Sources


def why_not_inline(gm: fx.GraphModule, sources: Sources) -> str | None:
    """Why a graph cannot be compiled inline.

    Args:
        gm: a forward graph as Dynamo hands it to a backend.
        sources: the nodes that bring parameters into it, and their names.

    Returns:
        The reason, for the user; None if it can be.
    """
    held: dict[int, str] = {}
    for node, names in sources.items():
        name = next(iter(names.values()))
        if node.op != "placeholder":
            return f"parameter {name!r} is not an input of the graph but an attribute"
        held.update(dict.fromkeys(storages(node), name))
    for node in gm.graph.nodes:
        if communicates_in_backward(node):  # a hook on one rank alone delays that rank's gradients
            return f"the backward of {node.name!r} communicates, and all ranks must send in the same order"
        value = example_value(node)
        nested = isinstance(value, NestedTensor) and node not in sources  # its gradients are not nested
        crosses = node.op == "placeholder" or any(user.op == "output" for user in node.users)
        inner = type(value).__name__ == "DTensor" and not crosses  # importing the class takes long
        if is_traceable_wrapper_subclass(value) and not nested and not inner:
            known = [f"parameter {name!r}" for name in sources.get(node, {}).values()]
            what = known[0] if known else repr(node.name)
            return f"{what} is a {type(value).__name__}, a tensor subclass that wraps other tensors"
        written = (key for key in written_storages(node) if key in held)
        if (key := next(written, None)) is not None:
            may = "is written to in the graph" if is_known(node) else f"may be written to by {node.name!r}"
            return f"parameter {held[key]!r} {may}"
    return None
