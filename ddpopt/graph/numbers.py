"""Turn the changing numbers of a graph into tensors, for backends that take numbers for constants.

Where an operator takes such a number, the graph calls a function instead; as the backend traces it, operators
that take tensors are what remains.

Invariant: the graph computes the same, in the same dtypes, but may round differently where a number scaled
another operand.
"""

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from ddpopt.errors import UnsupportedError

aten: Any = torch.ops.aten
OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "sym_min": lambda a, b: a.clamp(max=b) if isinstance(a, Tensor) else b.clamp(max=a),
    "sym_max": lambda a, b: a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a),
    "sym_float": lambda a: a,
    "round": lambda a, digits=None: a.round(decimals=digits or 0),
}
"""Functions of numbers that torch's functions of that name do not replace."""
FOREACH = "_foreach_"
WITH_TENSORS: Mapping[str, Callable[..., Tensor]] = {
    "add": lambda a, b, alpha=1: a + b * alpha,
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "addcdiv": lambda a, b, c, value: a + b / c * value,
    "addcmul": lambda a, b, c, value: a + b * c * value,
    "lerp": lambda a, b, weight: a + (b - a) * weight,
    "full": lambda size, value, **form: torch.ones(size, **form) * value,
    "new_full": lambda like, size, value, **form: like.new_ones(size, **form) * value,
    "full_like": lambda like, value, **form: torch.ones_like(like, **form) * value,
    "scalar_tensor": lambda value, device=None, **_: value.to(device or "cpu", copy=True),
}
"""Operators of which no overload takes tensors for all numbers."""


def numbers_as_tensors(graph: fx.Graph) -> None:
    """Read no number from a tensor: use the tensor itself.

    Args:
        graph: the graph, which is changed; ``meta["val"]`` of its nodes has what they return.
    """
    numbers: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.target == aten._local_scalar_dense.default:
            node.target = aten.amax.default
            node.meta = {}  # of one element, which may be written to later
            numbers[node] = None
        elif node.op == "call_function" and any(each in numbers for each in node.all_input_nodes):
            value = node.meta.get("val")
            if isinstance(value, (torch.SymFloat, torch.SymInt)):
                numbers[node] = None
                name = node.target.__name__.removeprefix("_sym_")
                if node.target is not getattr(operator, name, None):
                    node.target = OF_NUMBERS.get(name) or getattr(torch, name)
            else:
                dtype = tree_map_only(Tensor, lambda each: each.dtype, value)
                node.args = (node.target, dtype, *node.args)
                node.target = with_tensors


def with_tensors(target: Any, dtype: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator with tensors where it takes numbers.

    Args:
        target: the operator.
        dtype: of what it returns; a list if that is a list.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        UnsupportedError: the operator takes numbers only.
    """
    packet = getattr(target, "overloadpacket", target)
    name = packet.__name__
    try:
        if not name.startswith(FOREACH):
            return _call(packet, name, dtype, args, kwargs)
        lists = [each if isinstance(each, (list, tuple)) else itertools.repeat(each) for each in args]
        dtypes = itertools.repeat(None) if name.endswith("_") else dtype
        rows = zip(dtypes, zip(*lists, strict=False), strict=False)
        return [_call(packet, name.removeprefix(FOREACH), each, row, kwargs) for each, row in rows]
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedError(f"{name} takes a number that changes; make the number a tensor") from error


def _call(packet: Any, name: str, dtype: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    function = name.rstrip("_")
    found: Tensor = (WITH_TENSORS.get(function) or getattr(aten, function, packet))(*args, **kwargs)
    return args[0].copy_(found) if name.endswith("_") else found.to(dtype)
