"""Which of its inputs a graph node views or passes on, according to the storages of its example value."""

from collections.abc import Iterable

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from ddpopt.graph.effects import mutated_inputs
from ddpopt.graph.nodes import SOURCES, example_value, read_storages, storages, tensors_in


def viewed_input(node: fx.Node) -> fx.Node | None:
    """The input that `node` only takes a view (or views) of, or None."""
    if not is_view(node):
        return None
    own = set(storages(node))
    return next((source for source in node.all_input_nodes if own.issubset(storages(source))), None)


def returned_input(node: fx.Node) -> fx.Node | None:
    """The input that `node` writes to and returns (its value is that same tensor), or None."""
    value = example_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    return next((source for source in mutated_inputs(node) if example_value(source) is value), None)


def passes_on_input(node: fx.Node) -> bool:
    """Whether `node` returns one of its inputs unchanged, as ``contiguous()`` may, and writes to none."""
    returned = tensors_of([node])
    given = tensors_of(node.all_input_nodes)
    return not returned.keys().isdisjoint(given) and not mutated_inputs(node)


def tensors_of(nodes: Iterable[fx.Node]) -> dict[int, torch.Tensor]:
    """The tensors in the values of `nodes`, by identity."""
    return {id(tensor): tensor for node in nodes for tensor in tensors_in(example_value(node))}


def is_view(node: fx.Node) -> bool:
    """Whether everything that `node` returns lies in the memory of its inputs, and it writes to none of them.

    A call of a module or of a higher-order operator may do more than make the view that it returns.
    """
    if node.op in (*SOURCES, "output", "call_module") or isinstance(node.target, HigherOrderOperator):
        return False
    own = set(storages(node))
    return bool(own) and own <= read_storages(node).keys() and not mutated_inputs(node)


def first_names(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Map each of `nodes` (in graph order) that returns a tensor it writes to, to the node that made it."""
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        returned = returned_input(node)
        if returned is not None:
            found[node] = found.get(returned, returned)
    return found
