"""Reading FX graphs: the basic queries on nodes that all other modules share.

Positions count the *body* of a graph: all nodes except placeholders, attributes and the output.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module, _use_lazy_graph_module
from torch.utils import _pytree as pytree

SOURCES = ("placeholder", "get_attr")
"""Node kinds that bring a value into a graph and compute nothing."""

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""The types of symbolic numbers."""

CompilerFn = Callable[..., Callable[..., Any]]
"""A Dynamo backend: ``(gm, example_inputs) -> callable``; some take options."""


CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class Missing:
    """The example value of a node that has none: nothing is known about what it returns."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


def body_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of `graph` that compute something, in order."""
    return [node for node in graph.nodes if node.op not in (*SOURCES, "output")]


def example_value(node: fx.Node) -> object:
    """A node's value from tracing, or `MISSING`."""
    return node.meta.get("example_value", node.meta.get("val", MISSING))


def fetch(module: object, path: str, *default: object) -> object:
    """The attribute of a module at a dotted path; `default`, if given, where there is none."""
    return functools.reduce(lambda value, name: getattr(value, name, *default), path.split("."), module)


def checkpointed(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The body of a checkpointed region, whose placeholders receive ``node.args[1:]``; None for others."""
    holder = node.args[0] if node.target is CHECKPOINT else None
    if not isinstance(holder, fx.Node) or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None
    body = fetch(gm, str(holder.target))
    return body if isinstance(body, fx.GraphModule) else None


def operands(region: fx.Node, body: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Map each placeholder in the body of a `checkpointed` region to the node whose value it receives."""
    given = [arg for arg in region.args[1:] if isinstance(arg, fx.Node)]
    return dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))


def with_values(arguments: Any, value_of: Callable[[fx.Node], object]) -> Any:
    """Nested arguments of a node, with each node replaced by its value."""
    replace: Any = value_of  # fx types the result as an argument, but it can be anything
    return fx.map_arg(arguments, replace)


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors in a value."""
    # most values are a tensor, for which a tree is slow
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def requires_grad(value: object) -> bool:
    """Whether any tensor in `value` requires grad; assumed for a missing value."""
    return value is MISSING or any(map(_is_trained, tensors_in(value)))


def overlaps_itself(value: object) -> bool:
    """Whether elements of a view that requires grad may share memory, as sliding windows do.

    AOTAutograd loses parts of such a result's gradient, except for a view of repeated elements (``expand``).
    """
    if not (isinstance(value, torch.Tensor) and value.layout == torch.strided and value._is_view()):
        return False
    reach = 0
    overlaps = False
    for stride, size in sorted(zip(map(_hint, value.stride()), map(_hint, value.shape), strict=True)):
        overlaps |= 0 < stride <= reach and size > 1
        reach += stride * (size - 1)
    return overlaps and requires_grad(value)


def _hint(number: int | torch.SymInt) -> int:
    """The number that a symbol stands for in this trace, without a guard; 2 if there is none."""
    return number if isinstance(number, int) else int(getattr(number.node, "hint", None) or 2)


def _is_trained(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires grad at any level: a batched tensor inside ``vmap`` reports False itself."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor) and not tensor.requires_grad:
        tensor = functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def storages(node: fx.Node) -> list[int]:
    """Identities of the storages behind a node's tensors; views of one tensor share a storage."""
    return storages_of(example_value(node))


def by_storage(nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
    """For the identity of each storage, the nodes whose tensors it holds."""
    found: dict[int, list[fx.Node]] = {}
    for node in nodes:
        for key in storages(node):
            found.setdefault(key, []).append(node)
    return found


def storages_of(value: object) -> list[int]:
    """Identities of the storages behind the tensors in `value`."""
    return [key for tensor in tensors_in(value) for key in _own_storages(tensor)]


def _own_storages(tensor: Any) -> list[int]:
    """The storage of a tensor, of the tensor in a functorch wrapper, or of the values of a nested tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.is_nested and tensor.layout == torch.jagged:
        return _own_storages(tensor._values)
    return [tensor.untyped_storage()._cdata] if tensor.layout == torch.strided else []


def read_storages(node: fx.Node) -> dict[int, None]:
    """Identities of the storages behind the inputs of a node."""
    return {key: None for source in node.all_input_nodes for key in storages(source)}


def is_scalar(node: fx.Node) -> bool:
    """Whether the value of a node is a symbolic float or bool.

    AOTAutograd does not accept these as inputs of a graph with a backward, but it accepts what they are
    computed from (sizes, the tensors behind float arguments). So they are recomputed where they are read.
    """
    return isinstance(example_value(node), (torch.SymFloat, torch.SymBool))


def unwritten_module(root: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A module whose Python code is generated when it first runs, as for Dynamo's own modules.

    Otherwise a module around it would generate the code again. Uses a private part of torch:
    there is no public way to do this.
    """
    with _use_lazy_graph_module(True):
        module: fx.GraphModule = _make_graph_module(root, graph)
    return module


def write_code(gm: fx.GraphModule) -> None:
    """Generate the Python code of an `unwritten_module` now, so that its ``forward`` may be kept."""
    _LazyGraphModule.force_recompile(gm)


def module_like(gm: fx.GraphModule, graph: fx.Graph, held: Mapping[str, Any] | None = None) -> fx.GraphModule:
    """A module around `graph` that Dynamo's backends treat as one of Dynamo's own, as they treat `gm`.

    AOTAutograd treats a graph with ``dynamo_compile_id`` in its meta and with ``_param_name_to_source`` as
    one of Dynamo's, and then reads the source of each input.

    Args:
        gm: shares its parameters, attributes and metadata with the new module.
        graph: may read attributes of `gm` and of `held`.
        held: additional attributes and submodules.
    """
    root: dict[str, Any] = dict(held or {})
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module") and str(node.target) not in root:
            root[str(node.target)] = fetch(gm, str(node.target))
    module = unwritten_module(root, graph)
    module.meta = dict(gm.meta)
    for name in ("_param_name_to_source", "shape_env", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(module, name, getattr(gm, name))
    return module
