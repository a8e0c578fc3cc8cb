"""Divide a checkpointed region where a bucket ends inside it.

Dynamo puts a checkpointed region into its graph as one call of a body. All its gradients would leave
together, while in eager they leave one after the other as the region's backward proceeds. So the region is
divided at the places where its buckets end: two checkpointed regions, one after the other, recompute the
same values, and keep one more, that which passes from the first to the second.

A region through which no gradient passes has nothing to recompute. It is written out: torch refuses to
compile one that draws random numbers in a segment that has no backward.

Invariant: every piece keeps the checkpoint's own settings and policy; a graph in which there is nothing to do
comes back as the same object.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import fx

from ddpopt.graph.effects import mutated_inputs
from ddpopt.graph.nodes import (
    CHECKPOINT,
    SOURCES,
    body_nodes,
    checkpointed,
    example_value,
    fetch,
    module_like,
    storages,
)
from ddpopt.graph.rewriting import Argument, Copies, rewritten
from ddpopt.graph.state import State, states
from ddpopt.planning.facts import gradient_carriers

_NUMBERS = (torch.SymFloat, torch.SymBool)


def divide_regions(
    gm: fx.GraphModule, find_cuts: Callable[[fx.GraphModule], Sequence[str]]
) -> fx.GraphModule:
    """Divide the checkpointed regions of `gm` where it would be cut if they were written out.

    Args:
        gm: a graph; it is left as it is.
        find_cuts: names of the nodes before which a graph without regions would be cut.

    Returns:
        A new module; or `gm` itself if no cut would fall into a region.
    """
    regions = _regions(gm)
    if not regions:
        return gm
    written_out, inner = _write_out(gm, regions)
    places = {region: _places(body) for region, body in regions.items()}
    openers: dict[fx.Node, dict[fx.Node, None]] = {}
    for name in find_cuts(written_out):
        if name in inner:
            region, node = inner[name]
            if node in places[region]:
                openers.setdefault(region, {})[places[region][node]] = None
    held: dict[str, object] = {}
    writers = {
        region: functools.partial(_write_pieces, regions[region], nodes, held)
        for region, nodes in openers.items()
    }
    return rewritten(gm, writers, held) if openers else gm


def write_out_idle_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Write out the checkpointed regions of `gm` that have no backward.

    Args:
        gm: a graph; it is left as it is.

    Returns:
        A new module; or `gm` itself if it has no such region.
    """
    regions = _regions(gm)
    carriers = gradient_carriers(gm.graph) if regions else {}
    idle = {region: body for region, body in regions.items() if region not in carriers}
    return _write_out(gm, idle)[0] if idle else gm


def _places(body: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each node of a body, the one before which it is divided if a bucket ends there.

    Before the node itself as a rule; inside a span of autocast or ``no_grad``, before the whole
    span, which must not begin in one piece and end in another. Never before the first node, nor after
    symbolic numbers alone: a piece of these would be divided from what reads them, which recomputes them.
    And nowhere between a value and the last write to it: the piece that makes it recomputes and keeps it, and
    a later one would write to what was kept. Nor between a symbolic float or bool that is read off a tensor
    and its last reader: AOTAutograd has none of these cross from one graph to another.
    """
    found: dict[fx.Node, fx.Node] = {}
    unwritten = _unwritten(body.graph)
    unread = _unread(body.graph)
    opener, begun = None, False
    for node, state in states(body.graph):
        if state == State():
            opener = node if begun and node in unwritten and node in unread else None
        if opener is not None:
            found[node] = opener
        begun |= not isinstance(example_value(node), (torch.SymInt, torch.SymFloat, torch.SymBool))
    return found


def _unwritten(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes from which on nothing is written to that was made before them."""
    made = {key: node for node in reversed(graph.nodes) for key in storages(node)}
    found: dict[fx.Node, None] = {}
    awaited: dict[int, None] = {}  # what is yet to be written to, and was made before
    for node in reversed(graph.nodes):
        awaited.update(dict.fromkeys(key for source in mutated_inputs(node) for key in storages(source)))
        for key in [key for key in awaited if made[key] is node]:
            del awaited[key]
        if not awaited:
            found[node] = None
    return found


def _unread(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes from which on no number is read that was read off a tensor before them, or made of one."""
    taken: dict[fx.Node, None] = {}
    for node in graph.nodes:
        of_taken = not taken.keys().isdisjoint(node.all_input_nodes)
        of_tensors = node.op not in SOURCES and not _is_made_of_numbers(node)
        if isinstance(example_value(node), _NUMBERS) and (of_taken or of_tensors):
            taken[node] = None
    found: dict[fx.Node, None] = {}
    awaited: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        awaited.update(dict.fromkeys(source for source in node.all_input_nodes if source in taken))
        awaited.pop(node, None)
        if not awaited:
            found[node] = None
    return found


def _regions(gm: fx.GraphModule) -> dict[fx.Node, fx.GraphModule]:
    """The checkpointed regions of a graph, with their bodies."""
    bodies = ((node, checkpointed(gm, node)) for node in gm.graph.nodes)
    return {node: body for node, body in bodies if body is not None}


def _write_out(
    gm: fx.GraphModule, regions: Mapping[fx.Node, fx.GraphModule]
) -> tuple[fx.GraphModule, dict[str, tuple[fx.Node, fx.Node]]]:
    """`gm` with the nodes of each region in its place; and for each such node, whose it is."""
    inner: dict[str, tuple[fx.Node, fx.Node]] = {}
    held: dict[str, object] = {}

    def write(region: fx.Node, graph: fx.Graph, copies: Copies) -> Argument:
        body = regions[region]
        values = _operands(body, region, copies)
        for step in (n for n in body.graph.nodes if n.op not in ("placeholder", "output")):
            values[step] = copied = graph.node_copy(step, values.__getitem__)
            copied.meta["example_value"] = step.meta.get("example_value")
            if step.op == "get_attr":
                copied.target = f"{region.name}_{step.target}".replace(".", "_")
                held[copied.target] = fetch(body, str(step.target))
            inner[copied.name] = (region, step)
        return fx.map_arg(body.graph.output_node().args[0], values.__getitem__)

    return rewritten(gm, dict.fromkeys(regions, write), held), inner


def _write_pieces(
    body: fx.GraphModule,
    openers: Iterable[fx.Node],
    held: dict[str, object],
    region: fx.Node,
    graph: fx.Graph,
    copies: Copies,
) -> Argument:
    """Add one checkpointed call for each piece of a region to `graph`; what the region returns."""
    values = _operands(body, region, copies)
    pieces = [_with_scalars(nodes) for nodes in _pieces(body, openers)]
    for index, nodes in enumerate(pieces):
        later = {n for piece in pieces[index + 1 :] for n in _read(piece)}
        later.update(body.graph.output_node().all_input_nodes)
        exports = [node for node in nodes if node in later and node not in values]
        inputs = [n for n in _read(nodes) if n in values]
        name = f"{region.name}_piece_{index}"
        held[name] = _piece(body, nodes, inputs, exports)
        holder = graph.get_attr(name)
        call = graph.call_function(CHECKPOINT, (holder, *(values[n] for n in inputs)), dict(region.kwargs))
        call.meta = {**region.meta, "example_value": tuple(n.meta["example_value"] for n in exports)}
        for position, node in enumerate(exports):
            values[node] = graph.call_function(operator.getitem, (call, position))
            values[node].meta = dict(node.meta)
    return fx.map_arg(body.graph.output_node().args[0], values.__getitem__)


def _operands(body: fx.GraphModule, region: fx.Node, copies: Copies) -> dict[fx.Node, Argument]:
    """The value of each placeholder of a region's body."""
    operands = [copies[arg] for arg in region.args[1:] if isinstance(arg, fx.Node)]
    return dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))


def _pieces(body: fx.GraphModule, openers: Iterable[fx.Node]) -> list[list[fx.Node]]:
    pieces: list[list[fx.Node]] = [[]]
    opening = set(openers)
    for node in body_nodes(body.graph):
        if node in opening and pieces[-1]:
            pieces.append([])
        pieces[-1].append(node)
    return pieces


def _with_scalars(piece: Sequence[fx.Node]) -> list[fx.Node]:
    """A piece that recomputes the symbolic floats and bools that it reads from earlier pieces.

    As in a layout: AOTAutograd has none cross between graphs, but sizes may, of which they are made.
    One that is read off a tensor is read in one piece.
    """
    found: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            is_made = source.op not in SOURCES and source not in found
            if is_made and _is_made_of_numbers(source):
                add(source)
        found[node] = None

    for node in piece:
        add(node)
    return list(found)


def _is_made_of_numbers(node: fx.Node) -> bool:
    """Whether it is a symbolic float or bool, and computed from numbers alone."""
    return isinstance(example_value(node), _NUMBERS) and not any(
        isinstance(example_value(source), torch.Tensor) for source in node.all_input_nodes
    )


def _read(piece: Sequence[fx.Node]) -> list[fx.Node]:
    """What a piece reads from elsewhere, in order of first use."""
    own = set(piece)
    return [n for n in dict.fromkeys(n for node in piece for n in node.all_input_nodes) if n not in own]


def _piece(
    body: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], exports: Sequence[fx.Node]
) -> fx.GraphModule:
    """The body of one piece, with the policy of the whole."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)

    def read(node: fx.Node) -> fx.Node:
        if node not in copies:  # attributes are read again in each piece
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, read)
    graph.output(tuple(copies[node] for node in exports))
    return module_like(body, graph)
