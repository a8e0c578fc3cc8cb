"""Copying a graph with other nodes in the place of some.

Invariant: what is not replaced is copied with its metadata, and with the source that Dynamo left on it.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ddpopt.graph.nodes import module_like

Argument = Any
"""What a value is in a copied graph: a node, or nested tuples of them."""
Copies = Mapping[fx.Node, Argument]
Write = Callable[[fx.Node, fx.Graph, Copies], Argument]
"""Adds nodes to a graph in the place of one, given what others are there; returns what this one is."""


def copy_input(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """Copy a placeholder with the source that Dynamo left on it, for which AOTAutograd asks."""
    copied = graph.node_copy(node)
    copied._dynamo_source = getattr(node, "_dynamo_source", None)
    return copied


def rewritten(
    gm: fx.GraphModule, writers: Mapping[fx.Node, Write], held: Mapping[str, object] | None = None
) -> fx.GraphModule:
    """Copy a graph.

    Args:
        gm: the graph; it is left as it is.
        writers: what comes in the place of some nodes. Where that is a tuple, its items come in the place of
            the nodes that pick them.
        held: attributes that the writers' nodes read; they may fill it on the way.

    Returns:
        A module like `gm`, without attributes that nothing reads any more.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Argument] = {}
    unread = {arg for node in writers for arg in node.all_input_nodes if arg.op == "get_attr"}
    for node in gm.graph.nodes:
        base = node.args[0] if node.target is operator.getitem else None
        if node in writers:
            copies[node] = writers[node](node, graph, copies)
        elif isinstance(base, fx.Node) and base in writers and isinstance(copies[base], tuple | list):
            copies[node] = copies[base][node.args[1]]
        elif node.op == "placeholder":
            copies[node] = copy_input(node, graph)
        elif node not in unread or not writers.keys() >= node.users.keys():
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return module_like(gm, graph, held)
