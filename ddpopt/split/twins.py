"""Finding twins: segments that can share one compilation.

A signature holds everything that a compiler may look at: operations, literals, the layout of each input,
which inputs share storage, and checkpoint policies. Parameters are inputs, so two layers of one kind have the
same signature. Values that belong to a single graph (a constant tensor, a submodule) are compared by
identity, so segments that hold different ones are never twins.

Invariant: equal signatures mean interchangeable compiled code. If this cannot be known, there is no
signature.
"""

import functools
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ddpopt.graph.nodes import example_value, fetch

POLICIES = ("recompute", "ac_graph_id", "custom", "has_backward_hook", "partitioner_tag", "autocast")
"""Node metadata that changes how a node is compiled."""

ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
LITERALS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def signature(segment: fx.GraphModule, inputs: Sequence[object]) -> tuple[Hashable, ...] | None:
    """Everything that a compiler sees of a segment, as a hashable value.

    Args:
        segment: the segment before compilation.
        inputs: the example inputs that it would be compiled with, one for each placeholder.

    Returns:
        A hashable value, equal for twins; None if this segment must be compiled separately.
    """
    layouts = [_layout(value) for value in inputs]
    if any(layout is None for layout in layouts):
        return None
    return (tuple(layouts), _aliasing(inputs), _program(segment))


def _program(gm: fx.GraphModule) -> Hashable:
    number = {node: index for index, node in enumerate(gm.graph.nodes)}
    rows = []
    for node in gm.graph.nodes:
        target = node.target if node.op in ("call_function", "call_method") else _attribute_key(gm, node)
        policies = tuple((key, repr(node.meta[key])) for key in POLICIES if key in node.meta)
        rows.append((node.op, target, _frozen(node.args, number), _frozen(node.kwargs, number), policies))
    return tuple(rows)


def _attribute_key(gm: fx.GraphModule, node: fx.Node) -> Hashable:
    """The key of an attribute or submodule: its program if it is a graph, else its identity."""
    if node.op not in ("get_attr", "call_module"):
        return None
    value = fetch(gm, str(node.target))
    if isinstance(value, fx.GraphModule) and not any(True for _ in value.parameters()):
        meta = tuple(_layout(example_value(n)) for n in value.graph.nodes if n.op == "placeholder")
        return ("graph", meta, _policy(value), _program(value))
    return ("object", id(value))


def _policy(body: fx.GraphModule) -> Hashable:
    """The checkpoint policy of a body, by the identity of its function."""
    policy = body.meta.get("_checkpoint_context_fn")
    if isinstance(policy, functools.partial) and not policy.keywords:
        return (policy.func, *map(id, policy.args))
    return id(policy)


def _frozen(value: object, number: dict[fx.Node, int]) -> Hashable:
    """Arguments as a hashable value that distinguishes 1 from True and a list from a tuple."""
    if isinstance(value, fx.Node):
        return ("node", number[value])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_frozen(item, number) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _frozen(item, number)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_frozen(part, number) for part in (value.start, value.stop, value.step)))
    if isinstance(value, LITERALS):
        return (type(value).__name__, repr(value))
    return ("object", id(value))


def _layout(value: object) -> Hashable | None:
    """All static properties of one input; None if it cannot be compared."""
    if isinstance(value, torch.Tensor):
        if type(value) not in ORDINARY or value.layout != torch.strided:
            return None
        kind = isinstance(value, torch.nn.Parameter), value.dtype, str(value.device)
        place = _exact(value.shape), _exact(value.stride()), _exact([value.storage_offset()])
        autograd = value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value._is_view()
        return ("tensor", *kind, *place, *autograd, getattr(value, "_dynamo_static_input_type", None))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value).__name__, str(value.node.expr))
    return (type(value).__name__, repr(value)) if isinstance(value, LITERALS) else None


def _exact(numbers: Iterable[int | torch.SymInt]) -> tuple[Hashable, ...]:
    return tuple(str(n.node.expr) if isinstance(n, torch.SymInt) else n for n in numbers)


def _aliasing(inputs: Sequence[object]) -> tuple[int, ...]:
    """For each input, the index of the first input with the same storage."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(value.untyped_storage()._cdata, index) if isinstance(value, torch.Tensor) else index
        for index, value in enumerate(inputs)
    )
