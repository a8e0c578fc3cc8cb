"""Ways to get a cut graph wrong: each edits a stitched module in place, at a place that is drawn.

Some edits change nothing that anybody could see (a value cloned that nothing writes to): a certificate may
accept those, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

Choose = Callable[[int], int]
Edit = Callable[[], None]


class Mutant(NamedTuple):
    """One way: what it is called, and every edit of a stitched module that would be it."""

    name: str
    edits: Callable[[fx.GraphModule], Iterator[Edit]]

    def apply(self, stitched: fx.GraphModule, choose: Choose) -> bool:
        """Do one of its edits, as `choose` says of their number; whether there was one to do."""
        edits = list(self.edits(stitched))
        if not edits:
            return False
        edits[choose(len(edits))]()
        for module in (stitched, *segments(stitched)):
            module.graph.lint()
            module.recompile()
        return True


def segments(stitched: fx.GraphModule) -> list[fx.GraphModule]:
    calls = [node for node in stitched.graph.nodes if node.op == "call_module"]
    return [getattr(stitched, str(call.target)) for call in calls]


def steps(stitched: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of all segments that compute something."""
    for segment in segments(stitched):
        yield from (n for n in segment.graph.nodes if n.op in ("call_function", "call_method"))


def likeness(node: fx.Node) -> object:
    """Equal for values that may stand for one another."""
    value = node.meta.get("example_value")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def alike(node: fx.Node, others: Sequence[fx.Node]) -> list[fx.Node]:
    return [n for n in others if n is not node and likeness(n) is not None and likeness(n) == likeness(node)]


def left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        for source in alike(node, node.all_input_nodes):

            def edit(node: fx.Node = node, source: fx.Node = source) -> None:
                node.replace_all_uses_with(source)
                node.graph.erase_node(node)

            yield edit


def reads_another(stitched: fx.GraphModule) -> Iterator[Edit]:
    for segment in segments(stitched):
        earlier: list[fx.Node] = []
        for node in segment.graph.nodes:
            for source in node.all_input_nodes:
                for other in alike(source, earlier):
                    yield lambda node=node, source=source, other=other: node.replace_input_with(source, other)  # type: ignore[misc]
            earlier.append(node)


def swapped(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        following = node.next
        if following.op in ("call_function", "call_method") and node not in following.all_input_nodes:
            yield lambda node=node, following=following: following.append(node)  # type: ignore[misc]


def run_twice(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):

        def edit(node: fx.Node = node) -> None:
            with node.graph.inserting_after(node):
                node.graph.node_copy(node)

        yield edit


def called_otherwise(stitched: fx.GraphModule) -> Iterator[Edit]:
    others = {torch.relu: torch.tanh, F.relu: torch.tanh, torch.tanh: F.relu, F.gelu: F.relu}
    for node in steps(stitched):
        if node.target in others:
            yield lambda node=node: setattr(node, "target", others[node.target])  # type: ignore[misc]


def another_constant(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        for key, value in node.kwargs.items():
            if isinstance(value, float):
                yield lambda node=node, key=key: node.update_kwarg(key, 0.25)  # type: ignore[misc]
        for place, value in enumerate(node.args):
            if isinstance(value, float):
                yield lambda node=node, place=place: node.update_arg(place, 0.25)  # type: ignore[misc]


def given_another(stitched: fx.GraphModule) -> Iterator[Edit]:
    earlier: list[fx.Node] = []
    for node in stitched.graph.nodes:
        if node.op in ("call_module", "output"):
            for source in node.all_input_nodes:
                for other in alike(source, earlier):
                    yield lambda node=node, source=source, other=other: node.replace_input_with(source, other)  # type: ignore[misc]
        earlier.append(node)


def through(method: str) -> Callable[[fx.GraphModule], Iterator[Edit]]:
    """A segment is given what a method makes of a value."""

    def edits(stitched: fx.GraphModule) -> Iterator[Edit]:
        for call in stitched.graph.nodes:
            if call.op != "call_module":
                continue
            for source in (n for n in call.all_input_nodes if likeness(n) is not None):

                def edit(call: fx.Node = call, source: fx.Node = source) -> None:
                    with stitched.graph.inserting_before(call):
                        copied = stitched.graph.call_method(method, (source,))
                    copied.meta.update(source.meta)
                    call.replace_input_with(source, copied)

                yield edit

    return edits


def copy_left_out(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in stitched.graph.nodes:
        if node.target in ("clone", "detach", "requires_grad_", "copy_"):

            def edit(node: fx.Node = node) -> None:
                node.replace_all_uses_with(node.all_input_nodes[0])
                stitched.graph.erase_node(node)

            yield edit


def span_left_open(stitched: fx.GraphModule) -> Iterator[Edit]:
    for node in steps(stitched):
        if node.name.startswith(("suspended", "resumed")) and not node.users:
            yield lambda node=node: node.graph.erase_node(node)  # type: ignore[misc]


MUTANTS = (
    Mutant("a node is left out", left_out),
    Mutant("a node reads another value", reads_another),
    Mutant("two nodes are swapped", swapped),
    Mutant("a node runs twice", run_twice),
    Mutant("a node calls something else", called_otherwise),
    Mutant("a constant is another", another_constant),
    Mutant("a segment is given another value", given_another),
    Mutant("a segment is given a detached value", through("detach")),
    Mutant("a segment is given a copy", through("clone")),
    Mutant("a copy at a cut is left out", copy_left_out),
    Mutant("a span stays open or closed at a cut", span_left_open),
)
