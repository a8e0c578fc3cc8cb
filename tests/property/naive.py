"""What cutting a graph means, said without any care for speed: who passes what to whom, found by running it.

A graph is run on real tensors, node by node. A node writes where a tensor's version counter moves, and views
where storages are the same: nothing is read off names, schemas or example values. Whatever is asked then is
asked of every pair of nodes.

Invariant: shares no code with what plans, cuts or judges a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
SWITCHES = (ENTER, EXIT, torch._C._set_grad_enabled)


def tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Watched(fx.Interpreter):
    """A run of a graph, with what each node made, and which storages were ever written to."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[object]) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}
        self.written: set[int] = set()
        self.writers: set[fx.Node] = set()
        self.run(*inputs)

    def run_node(self, n: fx.Node) -> Any:
        given = [t for node in n.all_input_nodes for t in tensors(self.values[node])]
        versions = [tensor._version for tensor in given]
        self.values[n] = made = super().run_node(n)
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version != version:
                self.written.add(storage(tensor))
                self.writers.add(n)
        return made

    def viewed(self, node: fx.Node) -> fx.Node | None:
        """The node of whose tensor `node` is only a view, if that tensor is written to at some time."""
        if node.op in ("placeholder", "get_attr", "output") or node in self.writers:
            return None
        own = {storage(tensor) for tensor in tensors(self.values[node])}
        if not own & self.written:
            return None
        bases = (n for n in node.all_input_nodes if own <= {storage(t) for t in tensors(self.values[n])})
        return next(bases, None)

    def first(self, node: fx.Node) -> fx.Node:
        """The node that made the very tensor that `node` writes to and returns; else the node itself.

        A tensor that is a view does not cross a cut: so whoever returns it counts as making it.
        """
        made = node
        while made in self.writers:
            returned = [n for n in made.all_input_nodes if self.values[n] is self.values[made]]
            if not returned:
                break
            made = returned[0]
        return node if self.viewed(made) else made


class Piece(NamedTuple):
    """A segment: its nodes, the tensors that it is given, and how many it hands on, by name."""

    nodes: tuple[str, ...]
    given: frozenset[str]
    handed_on: frozenset[str]


def pieces(run: Watched, openers: Sequence[str]) -> list[Piece]:
    """What each segment of a graph holds, reads and hands on, if it is cut in front of `openers`."""
    segments: list[list[fx.Node]] = [[]]
    for node in run.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.name in openers:
            segments.append([])
        segments[-1].append(node)
    given = [{name for node in nodes for name in _read_outside(run, node, nodes)} for nodes in segments]
    returned = {name for node in run.graph.output_node().all_input_nodes for name in _names(run, node)}
    new = [[node for node in nodes if run.first(node) is node] for nodes in segments]
    made = [{name for node in nodes for name in _names(run, node)} for nodes in new]
    return [
        Piece(
            tuple(node.name for node in nodes),
            frozenset(given[place]),
            frozenset(made[place] & set().union(returned, *given[place + 1 :])),
        )
        for place, nodes in enumerate(segments)
    ]


def _read_outside(run: Watched, node: fx.Node, nodes: Sequence[fx.Node]) -> Iterator[str]:
    """The tensors from outside of `nodes` that `node` reads; for a view that is taken anew, its base."""
    for source in node.all_input_nodes:
        if source in nodes:
            continue
        source = run.first(source)
        if source.op == "get_attr" or source.target in SWITCHES:
            continue
        if run.viewed(source) is not None:
            yield from _read_outside(run, source, nodes)
        else:
            yield from _names(run, source)


def _names(run: Watched, node: fx.Node) -> Iterator[str]:
    """A name for each tensor in the value of a node."""

    def visit(value: object, name: str) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            yield name
        elif isinstance(value, (tuple, list)):
            for place, item in enumerate(value):
                yield from visit(item, f"item_{place}_of_{name}")

    yield from visit(run.values[node], run.first(node).name)


def pieces_of(stitched: fx.GraphModule) -> list[Piece]:
    """The segments that a stitched module really has."""
    found = []
    for call in stitched.graph.nodes:
        if call.op != "call_module":
            continue
        graph = getattr(stitched, str(call.target)).graph
        body = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        handed_on = [_source(node) for node in graph.output_node().args[0]]
        given = [node.name for node in graph.find_nodes(op="placeholder")]
        found.append(Piece(tuple(n.name for n in body), frozenset(given), frozenset(handed_on)))
    return found


def _source(node: fx.Node) -> str:
    """The name of what a segment hands on: a node, or an item that was picked out of one for it alone."""
    path = []
    while _is_picked(node):
        source, place = node.args
        assert isinstance(source, fx.Node)
        path.append(f"item_{place}")
        node = source
    return "_of_".join([*path, node.name])


def _is_picked(node: fx.Node) -> bool:
    """Whether a node only picks an item that its segment hands on."""
    return node.target is operator.getitem and "example_value" not in node.meta
