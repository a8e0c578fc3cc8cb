"""Cut a graph into segments: (GraphModule, Plan) -> stitched GraphModule.

The stitched module has the inputs and outputs of the original and calls one submodule per segment. Values
cross a cut as inputs and outputs of segments. Example values, stack traces, sources and checkpoint policies
stay on their nodes, so there are no deep copies, and nothing is run to learn a shape.

Only tensors and symbols cross a cut: a tuple crosses as its elements, and a constant that was known while
tracing is written into the segment that reads it. Autocast and grad mode spans that a cut falls into are
closed before the cut and reopened after it.

Invariant: linear in the nodes of the graph; the program stays the same (`ddpopt.proof` proves it).
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ddpopt.graph.nodes import example_value, module_like, requires_grad
from ddpopt.graph.rewriting import add_input, copy_input
from ddpopt.graph.state import EXIT_AUTOCAST, GRAD_MODE, State
from ddpopt.planning.plan import Plan
from ddpopt.split.layout import Layout, Leaf, Path, inputs_of, is_constant


def partition(gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
    """Cut `gm` according to `plan`.

    Args:
        gm: the graph that the plan was made for; it is not modified.
        plan: its cuts name the first node of each later segment.

    Returns:
        A new module that calls ``segment_0``, ``segment_1``, … and shares parameters and attributes
        with `gm`; or `gm` itself if the plan has no cuts.
    """
    first_nodes = [cut.before for cut in plan.cuts]
    if not first_nodes:
        return gm
    layout = Layout.of(gm.graph, first_nodes)
    segments = [_build_segment(layout, index) for index in range(len(first_nodes) + 1)]
    return _stitch(gm, layout, segments)


# --- one segment ---------------------------------------------------------------------------------


@dataclass
class _Segment:
    """A segment under construction."""

    layout: Layout
    graph: fx.Graph
    state: State
    inputs: dict[Leaf, fx.Node] = field(default_factory=dict)
    copies: dict[fx.Node, fx.node.Argument] = field(default_factory=dict)

    def read(self, node: fx.Node) -> fx.node.Argument:
        """What a copied node reads in place of a node of the graph."""
        if node not in self.copies:
            node = self.layout.source(node)  # the result of a write in another segment comes in as its target
        if node not in self.copies:
            if node.op == "get_attr":
                self.copies[node] = self.graph.node_copy(node, self.read)
            elif self.layout.is_recomputed(node):
                self.copies[node] = self.recompute(node)
            else:
                self.copies[node] = _rebuild(node, self.inputs)
        return self.copies[node]

    def recompute(self, node: fx.Node) -> fx.Node:
        """Recompute a node of an earlier segment, in the grad mode in which the graph computes it."""
        arguments = {source: self.read(source) for source in node.all_input_nodes}
        here = self.state.grad_enabled
        there = self.layout.grad_modes[node]
        if here != there:
            self.graph.create_node("call_function", GRAD_MODE, (there,), name="recomputed_grad_mode")
        copied = self.graph.node_copy(node, arguments.__getitem__)
        if here != there:
            self.graph.create_node("call_function", GRAD_MODE, (here,), name="resumed_grad_mode")
        return copied


def _build_segment(layout: Layout, index: int) -> _Segment:
    segment = _Segment(layout, fx.Graph(), layout.states[index])
    nodes = layout.segments[index]
    for leaf in inputs_of(nodes, layout, index):
        layout.export(leaf)
        meta = {"example_value": leaf.value} if leaf.path else leaf.node.meta
        segment.inputs[leaf] = add_input(segment.graph, leaf.name, meta, leaf.node)
    _enter(segment)
    for node in _recomputed_sources(nodes, layout):
        segment.read(node)  # before all other nodes: a reader may be inside a torch.func transform
    for node in nodes:
        segment.copies[node] = segment.graph.node_copy(node, segment.read)
        segment.state = segment.state.after(node)
    if index + 1 < len(layout.states):
        _leave(segment, layout.states[index + 1])
    return segment


def _recomputed_sources(nodes: Sequence[fx.Node], layout: Layout) -> Iterator[fx.Node]:
    """The nodes of other segments that nodes of one segment read, and that are recomputed."""
    for node in nodes:
        for n in node.all_input_nodes:
            if layout.segment_of.get(n) != layout.segment_of[node] and layout.is_recomputed(layout.source(n)):
                yield n


def _rebuild(node: fx.Node, leaves: Mapping[Leaf, fx.Node]) -> fx.node.Argument:
    """The value of a node outside the segment: nodes for its tensors, literals for its constants."""

    def build(value: object, path: Path) -> fx.node.Argument:
        if isinstance(value, (tuple, list)):
            items = [build(item, (*path, index)) for index, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if is_constant(value):
            return value  # type: ignore[return-value]  # `ddpopt.planning.cut_points` lets only literals cross
        return leaves[Leaf(node, path)]

    if node.op == "placeholder":
        return leaves[Leaf(node)]
    return build(example_value(node), ())


def _enter(segment: _Segment) -> None:
    """Reopen the spans that the cut before this segment falls into."""
    for node in segment.state.autocast:
        segment.copies[node] = segment.graph.node_copy(node, segment.read)
    if not segment.state.grad_enabled:
        segment.graph.create_node("call_function", GRAD_MODE, (False,), name="resumed_grad_mode")


def _leave(segment: _Segment, state: State) -> None:
    """Close the spans that the cut after this segment falls into."""
    if not state.grad_enabled:
        segment.graph.create_node("call_function", GRAD_MODE, (True,), name="suspended_grad_mode")
    for node in reversed(state.autocast):
        name = f"suspended_{node.name}"
        segment.graph.create_node("call_function", EXIT_AUTOCAST, (segment.read(node),), name=name)


def _pick(graph: fx.Graph, value: fx.node.Argument, path: Path) -> fx.node.Argument:
    for index in path:
        value = graph.call_function(operator.getitem, (value, index))
    return value


# --- the whole -----------------------------------------------------------------------------------


def _without_gradient(node: fx.Node) -> fx.Node:
    """The replacement for a tensor that gets no gradient; it still requires grad if the tensor does.

    The kernels of a matrix product, and so its last bits, depend on whether its operands require grad.
    """
    detached = _call_method(node, "detach")
    return _call_method(detached, "requires_grad_") if requires_grad(example_value(node)) else detached


def _call_method(node: fx.Node, method: str) -> fx.Node:
    """A call of a method of a tensor, with the tensor that it returns as example value."""
    called = node.graph.call_method(method, (node,))
    with torch.enable_grad():
        called.meta["example_value"] = getattr(example_value(node), method)()
    return called


def _stitch(gm: fx.GraphModule, layout: Layout, segments: Sequence[_Segment]) -> fx.GraphModule:
    """A module that calls the segments one after the other."""
    modules: dict[str, fx.GraphModule] = {}
    graph = fx.Graph()
    values: dict[Leaf, fx.Node] = {}
    copies: dict[fx.Node, fx.node.Argument] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[Leaf(node)] = copy_input(node, graph)
    for index, segment in enumerate(segments):
        exports = layout.exports[index]
        segment.graph.output(tuple(_pick(segment.graph, segment.copies[e.node], e.path) for e in exports))
        modules[f"segment_{index}"] = module_like(gm, segment.graph)
        detached = {leaf: _without_gradient(values[leaf]) for leaf in layout.detached(segment.inputs, index)}
        given = {leaf: values[leaf] for leaf in segment.inputs} | detached
        call = graph.call_module(f"segment_{index}", tuple(given.values()))
        for position, leaf in enumerate(exports):
            values[leaf] = graph.call_function(operator.getitem, (call, position))
            values[leaf].meta["example_value"] = leaf.value

    def read(node: fx.Node) -> fx.node.Argument:
        node = layout.source(node)
        if node in layout.no_grad_views and node not in copies:
            returned = {leaf: _without_gradient(value) for leaf, value in values.items() if leaf.node is node}
            copies[node] = _rebuild(node, returned)
        elif node not in copies:
            copies[node] = graph.node_copy(node) if node.op == "get_attr" else _rebuild(node, values)
        return copies[node]

    graph.node_copy(gm.graph.output_node(), read)
    return module_like(gm, graph, modules)
