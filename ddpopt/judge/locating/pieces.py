"""Compile a chosen part of a model, and run the rest as it is.

A graph falls into pieces wherever planning allows a cut. A part is neighbouring pieces, and they are compiled
as one: everything is the whole graph as Dynamo hands it over, and nothing is no compiling.

Invariant: equal models give equal pieces, so that a part chosen in one run means the same in the next. The
pieces of a backward that compiled autograd captures are equal only where what its forward compiles is.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._dynamo import compiled_autograd

from ddpopt.graph.nodes import CompilerFn, body_nodes, example_value, fetch
from ddpopt.inline.handover import lend
from ddpopt.planning.cut_points import blocked_positions
from ddpopt.planning.plan import Cut, Plan
from ddpopt.split.partition import partition
from ddpopt.split.segments import compile_segments

SHOWN_OPERATIONS = 6
WHY = "to find what is wrong"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


class Piece(NamedTuple):
    """A piece of a graph: which graph, in the order in which they are compiled, and its place there."""

    graph: int
    place: int


class Part(NamedTuple):
    """Neighbouring pieces of one graph or of several in a row, the last one included."""

    first: Piece
    last: Piece

    def places(self, graph: int, pieces: int) -> range:
        """Which of so many pieces of a graph are in it."""
        if not self.first.graph <= graph <= self.last.graph:
            return range(0)
        start = self.first.place if graph == self.first.graph else 0
        return range(start, min(self.last.place + 1, pieces) if graph == self.last.graph else pieces)


def whole(first: int, last: int) -> Part:
    """All of some graphs in a row."""
    return Part(Piece(first, 0), Piece(last, sys.maxsize))


NOTHING, EVERYTHING = whole(0, -1), whole(0, sys.maxsize)


class Seen(NamedTuple):
    """A graph that was compiled.

    Attributes:
        pieces: what the nodes of each piece are called.
        is_backward: whether it is a backward that compiled autograd captured.
    """

    pieces: list[list[str]]
    is_backward: bool


class ChosenPieces:
    """A Dynamo backend that compiles the part chosen, and runs all else as it is.

    Args:
        compiler: what compiles it.
        part: what is chosen.
        cuts: whether graphs fall into pieces at all; else each graph is one, as the mode has cut it.

    Attributes:
        graphs: those so far.
    """

    def __init__(self, compiler: CompilerFn, part: Part = EVERYTHING, *, cuts: bool = True) -> None:
        self.__name__ = getattr(compiler, "__name__", type(compiler).__name__)
        self.compiler = compiler
        self.part = part
        self.cuts = cuts
        self.graphs: list[Seen] = []

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], **options: Any
    ) -> Callable[..., Any]:
        """Compile what is chosen of one graph."""
        pieces = pieces_of(gm, cuts=self.cuts)
        chosen = self.part.places(len(self.graphs), len(pieces))
        backward = compiled_autograd.in_compiled_autograd_region
        self.graphs.append(Seen([_words(gm, piece) for piece in pieces], backward))
        if not chosen:
            return gm.forward
        if len(chosen) == len(pieces):
            return self.compiler(gm, example_inputs, **options)
        openers = [pieces[place][0] for place in (chosen.start, chosen.stop) if 0 < place < len(pieces)]
        stitched = partition(gm, Plan((), (), tuple(Cut(0, node.name, WHY) for node in openers)))
        is_chosen = iter([True, False] if chosen.start == 0 else [False, True, False])

        def choose(segment: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
            return self.compiler(segment, inputs, **options) if next(is_chosen) else segment.forward

        reasons = [None] * (len(openers) + 1)
        return compile_segments(stitched, example_inputs, choose, reasons, share=False).call

    def pieces(self, part: Part) -> list[Piece]:
        """Every piece of a part."""
        return [
            Piece(number, place)
            for number, graph in enumerate(self.graphs)
            for place in part.places(number, len(graph.pieces))
        ]

    def described(self, part: Part) -> tuple[str, ...]:
        """Name the pieces of a part for a person, those of each graph in one line."""
        pieces = itertools.groupby(self.pieces(part), key=lambda piece: piece.graph)
        return tuple(self._describe(graph, [piece.place for piece in those]) for graph, those in pieces)

    def _describe(self, graph: int, places: Sequence[int]) -> str:
        pieces, is_backward = self.graphs[graph]
        first, last = places[0], places[-1]
        operations = _listed(list(itertools.chain.from_iterable(pieces[first : last + 1])))
        if not self.cuts:
            return f"compiled segment {graph} of {len(self.graphs)}: {operations}"
        kind = "captured backward" if is_backward else "graph"
        number = f"segment {first}" if first == last else f"segments {first} to {last}"
        return f"{kind} {graph}, {number} of {len(pieces)}: {operations}"


def _listed(words: Sequence[str]) -> str:
    """The first and the last few."""
    if len(words) > SHOWN_OPERATIONS:
        half = SHOWN_OPERATIONS // 2
        words = [*words[:half], f"{len(words) - 2 * half} more", *words[-half:]]
    return ", ".join(words)


def pieces_of(gm: fx.GraphModule, *, cuts: bool = True) -> list[list[fx.Node]]:
    """Divide the body of a graph wherever it can be cut.

    Args:
        gm: a graph of Dynamo's.
        cuts: false to leave it in one piece.

    Returns:
        The nodes of each piece, in order; one empty piece for a graph without a body.
    """
    body = body_nodes(gm.graph)
    if not cuts:
        return [body]
    blocked = blocked_positions(gm.graph)
    held = _emptied(gm.graph, body)
    starts = [i for i in range(1, len(body)) if blocked[i] is None and i not in held and not _lent(body, i)]
    return [body[start:end] for start, end in itertools.pairwise([0, *starts, len(body)])]


def _emptied(graph: fx.Graph, body: Sequence[fx.Node]) -> range:
    """Positions between the first and the last that read a list of inputs: compiled code empties it."""
    lists = [node for node in graph.find_nodes(op="placeholder") if isinstance(example_value(node), list)]
    reads = [i for i, node in enumerate(body) if not {*node.all_input_nodes}.isdisjoint(lists)]
    return range(reads[0] + 1, reads[-1] + 1) if reads else range(0)


def _lent(body: Sequence[fx.Node], position: int) -> bool:
    """Whether parameters are lent on both sides of a position: that is one thing, of which none is wrong."""
    return all(_lends(body[around]) for around in (position - 1, position))


def _lends(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.target is lend


def _words(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[str]:
    """What nodes are called, and the line of the user's that the last of them comes from."""
    words = [_word(gm, node) for node in nodes]
    lines = [line for line in map(source_line, nodes) if line]
    return [*words[:-1], f"{words[-1]} ({lines[-1]})"] if words and lines else words


def _word(gm: fx.GraphModule, node: fx.Node) -> str:
    if node.op == "call_module":
        held = fetch(gm, str(node.target))
        return type(held).__name__ if isinstance(held, nn.Module) else node.name
    return str(getattr(node.target, "__name__", node.target))


def source_line(node: fx.Node) -> str:
    """The innermost line outside of torch that a node comes from, like ``models.py:31``; else nothing."""
    root = str(Path(torch.__file__).parent)
    generated = "<"  # as in <eval_with_key>
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith((root, generated))]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
