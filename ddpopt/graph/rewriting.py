"""Copying a graph with other nodes in the place of some.

Invariant: what is not replaced is copied with its metadata, and with the source that Dynamo left on it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from ddpopt.graph.nodes import module_like

Argument = Any
"""What a value is in a copied graph: a node, or nested tuples of them."""
Copies = Mapping[fx.Node, Argument]
Write = Callable[[fx.Node, fx.Graph, Copies], Argument]
"""Adds nodes to a graph in the place of one, given what others are there; returns what this one is."""


def copy_node(node: fx.Node, graph: fx.Graph, copies: Copies) -> fx.Node:
    """Copy a node with the source that Dynamo left on it, which ``node_copy`` forgets."""
    copied = graph.node_copy(node, copies.__getitem__)
    if hasattr(node, "_dynamo_source"):
        copied._dynamo_source = node._dynamo_source
    return copied


def copy_body(
    inner: fx.Graph, graph: fx.Graph, values: dict[fx.Node, Argument]
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Copy the nodes of one graph into another, given the values of its placeholders; each with its copy."""
    for node in inner.nodes:
        if node.op not in ("placeholder", "output"):
            values[node] = copied = graph.node_copy(node, values.__getitem__)
            yield node, copied


def returned(inner: fx.Graph, values: Copies) -> Argument:
    """What a graph returns, given the values of its nodes."""
    return fx.map_arg(inner.output_node().args[0], values.__getitem__)


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
        elif node not in unread or not writers.keys() >= node.users.keys():
            copies[node] = copy_node(node, graph, copies)
    return module_like(gm, graph, held)
