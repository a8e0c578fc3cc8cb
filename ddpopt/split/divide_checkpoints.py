"""Divide a checkpointed region where a bucket ends inside it.

Dynamo puts a checkpointed region into its graph as one call of a body. All its gradients would leave
together, while in eager they leave one after the other as the region's backward proceeds. So the region is
divided where its buckets end: two consecutive checkpointed regions recompute the same values, and save in
addition only what passes from the first to the second.

A region through which no gradient passes has nothing to recompute. It is inlined: torch refuses to
compile one that draws random numbers in a segment that has no backward.

Invariant: every piece keeps the checkpoint's own settings and policy; a graph that needs no change is
returned as the same object.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import torch
from torch import fx

from ddpopt.graph.nodes import (
    CHECKPOINT,
    SOURCES,
    SYMBOLIC,
    body_nodes,
    checkpointed,
    example_value,
    fetch,
    is_scalar,
    module_like,
    operands,
)
from ddpopt.graph.rewriting import Argument, Copies, add_input, rewritten
from ddpopt.graph.state import ENTER_AUTOCAST, EXIT_AUTOCAST, states
from ddpopt.planning.cut_points import Body, Span, up_to_last_write
from ddpopt.planning.facts import gradient_carriers


def divide_regions(gm: fx.GraphModule, cuts_of: Callable[[fx.GraphModule], Sequence[str]]) -> fx.GraphModule:
    """Divide the checkpointed regions of `gm` where it would be cut if they were inlined.

    Args:
        gm: a graph; it is not modified.
        cuts_of: returns the names of the nodes before which a graph without regions would be cut.

    Returns:
        A new module; or `gm` itself if no cut would fall into a region.
    """
    regions = _regions(gm)
    if not regions:
        return gm
    inlined, inner = _inlined(gm, regions)
    places = {region: _places(body) for region, body in regions.items()}
    first_nodes: dict[fx.Node, dict[fx.Node, None]] = {}
    for name in cuts_of(inlined):
        if name in inner:
            region, node = inner[name]
            if node in places[region]:
                first_nodes.setdefault(region, {})[places[region][node]] = None
    held: dict[str, object] = {}
    writers = {
        region: functools.partial(_write_pieces, regions[region], nodes, held)
        for region, nodes in first_nodes.items()
    }
    return rewritten(gm, writers, held) if first_nodes else gm


def inline_idle_regions(gm: fx.GraphModule) -> fx.GraphModule:
    """Inline the checkpointed regions of `gm` that have no backward.

    Args:
        gm: a graph; it is not modified.

    Returns:
        A new module; or `gm` itself if it has no such region.
    """
    regions = _regions(gm)
    carriers = gradient_carriers(gm.graph) if regions else {}
    idle = {region: body for region, body in regions.items() if region not in carriers}
    return _inlined(gm, idle)[0] if idle else gm


def _places(region: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each node of a body, the node before which the body is divided if a bucket ends there.

    This is usually the node itself; inside a span of ``no_grad``, it is the start of the span, which must not
    begin in one piece and end in another. A span of autocast is closed and opened again between two pieces.
    """
    found: dict[fx.Node, fx.Node] = {}
    body = Body(region.graph)
    blocked = body.blocked(_undivided(body))
    first_node = None
    for (node, state), why in zip(states(region.graph), blocked, strict=True):
        if state.grad_enabled:
            first_node = node if why is None else None
        if first_node is not None:
            found[node] = first_node
    return found


def _undivided(body: Body) -> Iterator[Span]:
    """Where a body must not be divided."""
    first = (isinstance(example_value(n), SYMBOLIC) or n.target is ENTER_AUTOCAST for n in body.nodes)
    yield Span(0, sum(itertools.takewhile(bool, first)), "each piece recomputes numbers, and opens spans")
    for index, node in enumerate(body.nodes):
        if node.target is EXIT_AUTOCAST:
            yield Span(index, index, "each piece closes spans")
    yield from up_to_last_write(body)  # a piece would write to what an earlier one saves
    taken: dict[fx.Node, None] = {}
    for node in filter(is_scalar, body.nodes):
        if not _is_made_of_numbers(node) or not taken.keys().isdisjoint(node.all_input_nodes):
            taken[node] = None
            yield Span(body.position[node] + 1, body.last_use(node), "AOTAutograd does not let it cross")


def _regions(gm: fx.GraphModule) -> dict[fx.Node, fx.GraphModule]:
    """The checkpointed regions of a graph, with their bodies."""
    return {node: body for node in gm.graph.nodes if (body := checkpointed(gm, node)) is not None}


def _inlined(
    gm: fx.GraphModule, regions: Mapping[fx.Node, fx.GraphModule]
) -> tuple[fx.GraphModule, dict[str, tuple[fx.Node, fx.Node]]]:
    """`gm` with its regions inlined; and for each inlined node, by name, its region and its original."""
    inner: dict[str, tuple[fx.Node, fx.Node]] = {}
    held: dict[str, object] = {}

    def write(region: fx.Node, graph: fx.Graph, copies: Copies) -> Argument:
        body = regions[region]
        values = {place: copies[given] for place, given in operands(region, body).items()}
        returned = graph.graph_copy(body.graph, values)
        for step in (node for node in body.graph.nodes if node.op not in ("placeholder", "output")):
            copied = values[step]
            if step.op == "get_attr":
                copied.target = f"{region.name}_{step.target}".replace(".", "_")
                held[copied.target] = fetch(body, str(step.target))
            inner[copied.name] = (region, step)
        return returned

    return rewritten(gm, dict.fromkeys(regions, write), held), inner


def _write_pieces(
    body: fx.GraphModule,
    first_nodes: Container[fx.Node],
    held: dict[str, object],
    region: fx.Node,
    graph: fx.Graph,
    copies: Copies,
) -> Argument:
    """Add one checkpointed call for each piece of a region to `graph`; return the region's result."""
    values = {place: copies[given] for place, given in operands(region, body).items()}
    begins = dict(states(body.graph))
    divided = _pieces(body, first_nodes)
    spans = [begins[nodes[0]].autocast for nodes in divided] + [()]
    pieces = [_with_scalars([*span, *nodes]) for span, nodes in zip(spans, divided, strict=False)]
    for index, nodes in enumerate(pieces):
        later = {n for piece in pieces[index + 1 :] for n in _read(piece)}
        later.update(body.graph.output_node().all_input_nodes)
        exports = [node for node in nodes if node in later and node not in values]
        inputs = [n for n in _read(nodes) if n in values]
        name = f"{region.name}_piece_{index}"
        held[name] = _piece(body, nodes, inputs, exports, spans[index + 1])
        holder = graph.get_attr(name)
        call = graph.call_function(CHECKPOINT, (holder, *(values[n] for n in inputs)), dict(region.kwargs))
        call.meta = {**region.meta, "example_value": tuple(map(example_value, exports))}
        for position, node in enumerate(exports):
            values[node] = graph.call_function(operator.getitem, (call, position))
            values[node].meta = dict(node.meta)
    return fx.map_arg(body.graph.output_node().args[0], values.__getitem__)


def _pieces(body: fx.GraphModule, first_nodes: Container[fx.Node]) -> list[list[fx.Node]]:
    pieces: list[list[fx.Node]] = [[]]
    for node in body_nodes(body.graph):
        if node in first_nodes and pieces[-1]:
            pieces.append([])
        pieces[-1].append(node)
    return pieces


def _with_scalars(piece: Sequence[fx.Node]) -> list[fx.Node]:
    """A piece that recomputes the symbolic floats and bools that it reads from earlier pieces.

    As in a layout, AOTAutograd does not let them cross between graphs, only the sizes they are computed from.
    A number that is read from a tensor is used in one piece only.
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
    """Whether a node's value is a symbolic float or bool that is computed only from numbers."""
    values = map(example_value, node.all_input_nodes)
    return is_scalar(node) and not any(isinstance(value, torch.Tensor) for value in values)


def _read(piece: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside a piece that it reads, in order of first use."""
    own = set(piece)
    return [n for n in dict.fromkeys(n for node in piece for n in node.all_input_nodes) if n not in own]


def _piece(
    body: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    exports: Sequence[fx.Node],
    spans: Sequence[fx.Node],
) -> fx.GraphModule:
    """The body of one piece, with the policy of the whole region; it closes the spans that go on after it."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = add_input(graph, node.name, node.meta)

    def read(node: fx.Node) -> fx.Node:
        if node not in copies:  # attributes are read again in each piece
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, read)
    for node in reversed(spans):
        graph.call_function(EXIT_AUTOCAST, (copies[node],))
    graph.output(tuple(copies[node] for node in exports))
    return module_like(body, graph)
