"""Copying a graph while replacing some of its nodes.

Invariant: every other node is copied with its metadata and its Dynamo source.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ddpopt.graph.nodes import module_like

Argument = Any
"""A value in a copied graph: a node, or nested tuples of nodes."""
Copies = Mapping[fx.Node, Argument]
Write = Callable[[fx.Node, fx.Graph, Copies], Argument]
"""Adds the replacement of a node to a graph, given the copies of earlier nodes; returns its value there."""


def add_input(graph: fx.Graph, name: str, meta: Mapping[str, Any], of: fx.Node | None = None) -> fx.Node:
    """Add a placeholder; it has the Dynamo source of the node `of`, if that has one."""
    added = graph.placeholder(name)
    added.meta = dict(meta)
    added._dynamo_source = getattr(of, "_dynamo_source", None)  # AOTAutograd reads it on every input
    return added


def copy_input(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """Copy a placeholder with its Dynamo source, which AOTAutograd reads."""
    copied = graph.node_copy(node)
    copied._dynamo_source = getattr(node, "_dynamo_source", None)
    return copied


def rewritten(
    gm: fx.GraphModule, writers: Mapping[fx.Node, Write], held: Mapping[str, object] | None = None
) -> fx.GraphModule:
    """Copy a graph.

    Args:
        gm: the graph; it is not modified.
        writers: write the replacements of some nodes. If a replacement is a tuple, its items replace the
            getitem nodes that pick them.
        held: attributes that the writers' nodes read; the writers may add to it.

    Returns:
        A module like `gm`, without attributes that are no longer read.
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
