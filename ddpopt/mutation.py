"""Which of its inputs a graph node writes to, and which it views.

Dynamo's graphs hold torch functions, methods and operators as the user wrote them, so there is no one
schema to ask; each family of in-place notation is recognised here, and only here.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from ddpopt.graphs import SOURCES, example_value, storages

_INPLACE_OPERATORS = frozenset(
    {operator.setitem, operator.delitem, operator.iand, operator.ior}
    | {getattr(operator, n) for n in dir(operator) if n.startswith("i") and n[1:] in dir(operator)}
)
_RUNNING_STATISTICS = {
    torch.nn.functional.batch_norm: "training",
    torch.nn.functional.instance_norm: "use_input_stats",
}


def mutated_inputs(node: fx.Node) -> tuple[fx.Node, ...]:
    """The input nodes whose tensors `node` writes to, in argument order; empty for a pure node."""
    return tuple(dict.fromkeys(_mutated(node)))


def viewed_input(node: fx.Node) -> fx.Node | None:
    """The input of which `node` is nothing but a view (or views), or None."""
    if not is_view(node):
        return None
    own = set(storages(node))
    return next((source for source in node.all_input_nodes if own.issubset(storages(source))), None)


def returned_input(node: fx.Node) -> fx.Node | None:
    """The input that `node` writes to and returns, or None: its value is that very tensor."""
    value = example_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    return next((source for source in mutated_inputs(node) if example_value(source) is value), None)


def passes_on_input(node: fx.Node) -> bool:
    """Whether `node` returns one of its inputs as it is, as ``contiguous()`` may, and writes to none."""
    returned, given = tensors_of([node]), tensors_of(node.all_input_nodes)
    return not returned.keys().isdisjoint(given) and not mutated_inputs(node)


def tensors_of(nodes: Iterable[fx.Node]) -> dict[int, torch.Tensor]:
    """The tensors in the values of `nodes`, by identity."""
    found = pytree.tree_leaves([example_value(node) for node in nodes])
    return {id(leaf): leaf for leaf in found if isinstance(leaf, torch.Tensor)}


def is_view(node: fx.Node) -> bool:
    """Whether all that `node` returns lies in the memory of its inputs, to which it does not write.

    A call of a module or with a graph of its own may do more than to make the view that it returns.
    """
    if node.op in (*SOURCES, "output", "call_module") or isinstance(node.target, HigherOrderOperator):
        return False
    own = set(storages(node))
    given = {key for source in node.all_input_nodes for key in storages(source)}
    return bool(own) and own <= given and not mutated_inputs(node)


def first_names(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each of `nodes`, in graph order, that returns what it writes to: the node that made that tensor."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        returned = returned_input(node)
        if returned is not None:
            found[node] = found.get(returned, returned)
    return found


def _mutated(node: fx.Node) -> Iterator[fx.Node]:
    yield from _nodes(node.kwargs.get("out"))
    if node.op == "call_method":
        name = str(node.target)
        if name in ("__setitem__", "__iadd__") or (name.endswith("_") and not name.endswith("__")):
            yield from _nodes(node.args[:1])
    elif node.op == "call_function":
        yield from _mutated_by_function(node)


def _mutated_by_function(node: fx.Node) -> Iterator[fx.Node]:
    target = node.target
    if isinstance(target, str):
        return
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        yield from _mutated_by_schema(node, target)
    elif target in _INPLACE_OPERATORS or _ends_in_underscore(target):
        yield from _nodes(node.args[:1])
    else:
        arguments = _bound(node, target)
        if arguments.get("inplace") is True:
            yield from _nodes(node.args[:1] or arguments.get("input"))
        if target in _RUNNING_STATISTICS and arguments.get(_RUNNING_STATISTICS[target]) is not False:
            yield from _nodes([arguments.get("running_mean"), arguments.get("running_var")])


def _mutated_by_schema(
    node: fx.Node, target: torch._ops.OpOverload | torch._ops.OpOverloadPacket
) -> Iterator[fx.Node]:
    overload = target if isinstance(target, torch._ops.OpOverload) else getattr(target, target.overloads()[0])  # type: ignore[no-untyped-call]  # torch types it not
    for index, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from _nodes(given)


def _ends_in_underscore(target: Callable[..., object]) -> bool:
    if getattr(target, "__module__", None) == operator.and_.__module__:
        return False  # ``and_``, ``or_``, ``is_`` and ``not_`` only avoid Python's keywords
    name = getattr(target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _bound(node: fx.Node, target: Callable[..., object]) -> dict[str, object]:
    """The node's arguments by name, as far as the function's signature tells them."""
    names = _parameter_names(target)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


@functools.cache
def _parameter_names(target: Callable[..., object]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # builtins of torch._C have no signature, and no ``inplace`` either
        return ()


def _nodes(value: object) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes(item)
