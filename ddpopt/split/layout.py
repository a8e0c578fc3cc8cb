"""The layout of a cut graph: the segment of each node, and the values that cross the cuts.

A layout is computed once for a graph and its cuts; `ddpopt.split.partition` then builds the segments from it.

Invariant: only tensors and symbols cross a cut, each identified by the node that makes it and the path into
that node's value; linear in the nodes of the graph.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from ddpopt.graph.aliases import first_names, is_view, tensors_of, viewed_input
from ddpopt.graph.effects import written_storages
from ddpopt.graph.nodes import MISSING, SYMBOLIC, example_value, is_scalar, requires_grad, storages
from ddpopt.graph.state import ENTER_AUTOCAST, State, states
from ddpopt.planning.facts import gradient_carriers

Path = tuple[int, ...]
"""The indices of a leaf in a nested tuple."""


@dataclass(frozen=True)
class Leaf:
    """A tensor or symbol inside the value of a node: the node, and the path into its value."""

    node: fx.Node
    path: Path = ()

    @property
    def value(self) -> object:
        """The example value of the leaf."""
        value = example_value(self.node)
        for index in self.path:
            value = value[index]  # type: ignore[index]  # a path leads only through tuples
        return value

    @property
    def name(self) -> str:
        """The name of a placeholder for the leaf."""
        return "_of_".join([*(f"item_{index}" for index in reversed(self.path)), self.node.name])


@dataclass
class Layout:
    """The segment of each body node, and the values that each segment hands to later ones.

    Attributes:
        graph: the graph that is cut.
        segments: the body nodes of each segment, in order.
        states: the state in which each segment begins.
        segment_of: the segment of each body node, in order.
        grad_modes: whether each body node runs in grad mode.
        exports: the values that each segment returns.
    """

    graph: fx.Graph
    segments: list[list[fx.Node]] = field(default_factory=lambda: [[]])
    states: list[State] = field(default_factory=lambda: [State()])
    segment_of: dict[fx.Node, int] = field(default_factory=dict)
    grad_modes: dict[fx.Node, bool] = field(default_factory=dict)
    exports: list[dict[Leaf, None]] = field(default_factory=list)

    @classmethod
    def of(cls, graph: fx.Graph, first_nodes: Sequence[str]) -> "Layout":
        """The layout of a graph that is cut before the nodes named `first_nodes`."""
        layout = cls(graph)
        names = frozenset(first_nodes)
        for node, state in states(graph):
            if node.name in names:
                layout.segments.append([])
                layout.states.append(state)
            layout.segments[-1].append(node)
            layout.segment_of[node] = len(layout.segments) - 1
            layout.grad_modes[node] = state.grad_enabled
        layout.exports = [{} for _ in layout.segments]
        for node in graph.output_node().all_input_nodes:
            for leaf in _leaves(layout.source(node)):
                layout.export(leaf)
        return layout

    @cached_property
    def carriers(self) -> Mapping[fx.Node, None]:
        """The nodes whose backward runs."""
        return gradient_carriers(self.graph)

    @cached_property
    def mutations(self) -> Mapping[int, set[int]]:
        """For each storage that is written to, the segments that write to it."""
        found: dict[int, set[int]] = {}
        for node, index in self.segment_of.items():
            for key in written_storages(node):
                found.setdefault(key, set()).add(index)
        return found

    @cached_property
    def written_by_several_names(self) -> frozenset[int]:
        """The storages that are written to, and that several inputs share."""
        held = Counter(key for n in self.graph.find_nodes(op="placeholder") for key in {*storages(n)})
        return frozenset(key for key in self.mutations if held[key] > 1)

    @cached_property
    def binders(self) -> Mapping[sympy.Symbol, fx.Node]:
        """For each symbol, the node whose value is exactly that symbol."""
        found: dict[sympy.Symbol, fx.Node] = {}
        for node in self.graph.nodes:
            value = example_value(node)
            if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
                found.setdefault(value.node.expr, node)
        return found

    @cached_property
    def sources(self) -> Mapping[fx.Node, fx.Node]:
        """For each node that returns a tensor that it writes to, the node that brought the tensor in.

        A view that the graph returns is left out: it is returned in its state after the write.
        """
        return {
            node: first
            for node, first in first_names(self.segment_of).items()
            if viewed_input(first) is None or all(user.op != "output" for user in node.users)
        }

    @cached_property
    def no_grad_views(self) -> Mapping[fx.Node, None]:
        """The views that pass no gradient to their base, although tracing reports that they do."""
        found: dict[fx.Node, None] = {}
        for node, enabled in self.grad_modes.items():
            of_such_a_view = not found.keys().isdisjoint(node.all_input_nodes)
            if (of_such_a_view or (not enabled and _makes_trained(node))) and is_view(node):
                found[node] = None
        return found

    def source(self, node: fx.Node) -> fx.Node:
        """The node that brings in the tensor of `node`; another node if `node` returns a tensor it writes to.

        Only that tensor crosses a cut. AOTAutograd confuses a graph's outputs if an input that the graph
        writes to is returned after a view of another output.
        """
        return self.sources.get(node, node)

    def export(self, leaf: Leaf) -> None:
        """Make the segment that computes `leaf` return it."""
        if leaf.node in self.segment_of:
            self.exports[self.segment_of[leaf.node]].setdefault(leaf)

    def is_recomputed(self, node: fx.Node) -> bool:
        """Whether a node is recomputed in each segment that reads it.

        A symbolic float or bool cannot cross. A view of a tensor that is written to must be a view of the
        reading segment's own input. And if a view taken without gradient were returned, AOTAutograd would
        recreate it from its base, with gradient.
        """
        if node.op == "placeholder":
            return False
        if node in self.no_grad_views or is_scalar(node):
            return True
        written = bool(self.mutations) and not self.mutations.keys().isdisjoint(storages(node))
        return written and viewed_input(node) is not None

    def detached(self, inputs: Iterable[Leaf], index: int) -> list[Leaf]:
        """Inputs of the graph that require grad, but to which segment `index` sends no gradient.

        Autograd would wait for the backward of every segment that takes a parameter as an input, and so
        delay the bucket of a parameter that an early segment reads only under ``no_grad``; and it would fill
        in zeros where a later segment needs no gradient. If the graph writes to memory that several inputs
        share, they stay as they are: AOTAutograd has to see that.
        """
        held = (leaf for leaf in inputs if leaf.node.op == "placeholder" and isinstance(leaf.value, Tensor))
        apart = (leaf for leaf in held if self.written_by_several_names.isdisjoint(storages(leaf.node)))
        carried = self._carried(index)
        return [leaf for leaf in apart if requires_grad(leaf.value) and leaf.node not in carried]

    def _carried(self, index: int) -> dict[fx.Node, None]:
        """The nodes that segment `index` sends gradient to, also through recomputed nodes."""
        found: dict[fx.Node, None] = {}
        pending = [node for node in self.segments[index] if node in self.carriers]
        while pending:
            for source in map(self.source, pending.pop().all_input_nodes):
                if source not in found and source in self.carriers and self.is_recomputed(source):
                    pending.append(source)
                found[source] = None
        return found


def _makes_trained(node: fx.Node) -> bool:
    """Whether a node returns a tensor that requires grad and is not one of its inputs."""
    given = tensors_of(node.all_input_nodes)
    return any(key not in given and requires_grad(value) for key, value in tensors_of([node]).items())


def _leaves(node: fx.Node) -> list[Leaf]:
    """The tensors and symbols in a node's value; the node itself if its value is not known."""
    if node.op == "placeholder":
        return [Leaf(node)]
    found: list[Leaf] = []

    def visit(value: object, path: Path) -> None:
        if isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                visit(item, (*path, index))
        elif not is_constant(value):
            found.append(Leaf(node, path))

    visit(example_value(node), ())
    return found


def is_constant(value: object) -> bool:
    """Whether tracing fixed this value, so that a literal can replace the node."""
    return value is not MISSING and not isinstance(value, (torch.Tensor, *SYMBOLIC))


def inputs_of(nodes: Sequence[fx.Node], layout: Layout, index: int) -> list[Leaf]:
    """The values that a segment reads from outside, in order of first use; shape symbols first."""
    leaves: dict[Leaf, None] = {}
    seen: set[fx.Node] = set()
    for node in nodes:
        for source in node.all_input_nodes:
            leaves.update(dict.fromkeys(_crossing(source, layout, index, seen)))
    values = [*map(example_value, nodes), *(leaf.value for leaf in leaves)]
    # a graph with static shapes has no binders, so skip the search
    symbols = {s for value in values for s in _free_symbols(value)} if layout.binders else set()
    bound = [Leaf(layout.binders[s]) for s in sorted(symbols, key=str) if s in layout.binders]
    outside = [leaf for leaf in bound if layout.segment_of.get(leaf.node, -1) < index]  # not bound later
    return list(dict.fromkeys([*outside, *leaves]))


def _crossing(node: fx.Node, layout: Layout, index: int, seen: set[fx.Node]) -> Iterator[Leaf]:
    """The leaves that segment `index` needs as inputs to read `node`; of nodes already `seen`, none."""
    if layout.segment_of.get(node) == index or node in seen:
        return
    seen.add(node)
    node = layout.source(node)
    if node.op == "get_attr" or node.target is ENTER_AUTOCAST:
        return
    if not layout.is_recomputed(node):
        yield from _leaves(node)
        return
    for source in node.all_input_nodes:
        yield from _crossing(source, layout, index, seen)


def _free_symbols(value: object) -> Iterator[sympy.Symbol]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat)):
            yield from free_symbols(leaf)
