"""Compile a chosen part of a model, and run the rest uncompiled.

A graph is divided into pieces wherever planning allows a cut, and the pieces of all graphs are numbered in
the order in which they are compiled. A part is a range of pieces. The pieces of one graph within a part are
compiled together: the full range compiles each graph whole, and the empty range compiles nothing.

Invariant: equal models give equal pieces, so a part means the same in every run. The pieces of a backward
that compiled autograd captures are equal only if the same parts of its forward are compiled.
"""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ddpopt.graph.nodes import CompilerFn, body_nodes, example_value
from ddpopt.planning.cut_points import blocked_positions
from ddpopt.planning.plan import Cut, Plan
from ddpopt.split.partition import partition
from ddpopt.split.segments import compile_segments

NOTHING = range(0)
EVERYTHING = range(sys.maxsize)
SHOWN_OPERATIONS = 6
WHY = "to find what is wrong"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


class ChosenPieces:
    """A Dynamo backend that compiles the chosen part, and runs everything else uncompiled.

    Args:
        compiler: the backend that compiles it.
        part: the range of pieces.
        cuts: whether graphs are divided; else each graph that the mode passes is one piece.

    Attributes:
        graphs: the graphs so far, each as the names of the nodes in its pieces.
    """

    def __init__(self, compiler: CompilerFn, part: range = EVERYTHING, *, cuts: bool = True) -> None:
        self.__name__ = getattr(compiler, "__name__", type(compiler).__name__)
        self.compiler = compiler
        self.part = part
        self.cuts = cuts
        self.graphs: list[list[list[str]]] = []

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], **options: Any
    ) -> Callable[..., Any]:
        """Compile the chosen part of one graph."""
        pieces = pieces_of(gm) if self.cuts else [body_nodes(gm.graph)]
        chosen = _places(self.part, self.count, len(pieces))
        self.graphs.append([_words(piece) for piece in pieces])
        if not chosen:
            return gm.forward
        if len(chosen) == len(pieces):
            return self.compiler(gm, example_inputs, **options)
        first_nodes = [pieces[place][0] for place in (chosen.start, chosen.stop) if 0 < place < len(pieces)]
        stitched = partition(gm, Plan((), (), tuple(Cut(0, node.name, WHY) for node in first_nodes)))
        is_chosen = iter([True, False] if chosen.start == 0 else [False, True, False])

        def choose(segment: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
            return self.compiler(segment, inputs, **options) if next(is_chosen) else segment.forward

        reasons = [None] * (len(first_nodes) + 1)
        return compile_segments(stitched, example_inputs, choose, reasons, share=False)[0]

    @property
    def count(self) -> int:
        """The number of pieces so far."""
        return sum(map(len, self.graphs))

    def described(self, part: range) -> tuple[str, ...]:
        """Describe the pieces of a part for people, one line per graph."""
        lines = []
        before = 0
        for number, pieces in enumerate(self.graphs):
            places = _places(part, before, len(pieces))
            before += len(pieces)
            if places:
                where = f"compiled segment {number} of {len(self.graphs)}"
                if self.cuts:
                    where = f"graph {number}, {_numbered(places)} of {len(pieces)}"
                operations = [name for place in places for name in pieces[place]]
                lines.append(f"{where}: {_listed(operations)}")
        return tuple(lines)


def _places(part: range, before: int, pieces: int) -> range:
    """The places in a graph that belong to a part; `before` pieces are in earlier graphs."""
    start, stop = (min(max(end - before, 0), pieces) for end in (part.start, part.stop))
    return range(start, stop)


def _numbered(places: range) -> str:
    if len(places) == 1:
        return f"segment {places[0]}"
    return f"segments {places[0]} to {places[-1]}"


def _listed(words: Sequence[str]) -> str:
    """The first few and the last few words."""
    if len(words) > SHOWN_OPERATIONS:
        half = SHOWN_OPERATIONS // 2
        words = [*words[:half], f"{len(words) - 2 * half} more", *words[-half:]]
    return ", ".join(words)


def pieces_of(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Divide the body of a graph wherever it can be cut.

    Args:
        gm: a graph from Dynamo.

    Returns:
        The nodes of each piece, in order; one empty piece for a graph without a body.
    """
    body = body_nodes(gm.graph)
    blocked = blocked_positions(gm.graph, {*gm.graph.nodes})
    held = _emptied(gm.graph, body)
    starts = [place for place in range(1, len(body)) if blocked[place] is None and place not in held]
    return [body[start:end] for start, end in itertools.pairwise([0, *starts, len(body)])]


def _emptied(graph: fx.Graph, body: Sequence[fx.Node]) -> range:
    """The positions between the first and last reader of a list of inputs, which compiled code empties."""
    lists = [node for node in graph.find_nodes(op="placeholder") if isinstance(example_value(node), list)]
    reads = [i for i, node in enumerate(body) if not {*node.all_input_nodes}.isdisjoint(lists)]
    return range(reads[0] + 1, reads[-1] + 1) if reads else range(0)


def _words(nodes: Sequence[fx.Node]) -> list[str]:
    """The functions that nodes call, and the user's source line of the last node."""
    words = [str(getattr(node.target, "__name__", node.target)) for node in nodes]
    lines = [line for line in map(source_line, nodes) if line]
    return [*words[:-1], f"{words[-1]} ({lines[-1]})"] if lines else words


def source_line(node: fx.Node) -> str:
    """The innermost source line outside torch that a node comes from, like ``models.py:31``; else empty."""
    root = str(Path(torch.__file__).parent)
    generated = "<"  # as in <eval_with_key>
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith((root, generated))]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
