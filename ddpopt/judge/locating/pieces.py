"""Compile a chosen part of a model, and run the rest as it is.

A graph falls into pieces wherever planning allows a cut, and the pieces of all graphs are counted through, in
the order in which they are compiled. A part is a range of them. The pieces of a graph that are in it are
compiled as one: everything is each graph as Dynamo hands it over, and nothing is no compiling.

Invariant: equal models give equal pieces, so that a part chosen in one run means the same in the next. The
pieces of a backward that compiled autograd captures are equal only where what its forward compiles is.
"""

from __future__ import annotations

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

NOTHING, EVERYTHING = range(0), range(sys.maxsize)
SHOWN_OPERATIONS = 6
WHY = "to find what is wrong"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


class ChosenPieces:
    """A Dynamo backend that compiles the part chosen, and runs all else as it is.

    Args:
        compiler: what compiles it.
        part: what is chosen.
        cuts: whether graphs fall into pieces at all; else each graph is one, as the mode has cut it.

    Attributes:
        graphs: those so far, as what the nodes of each of their pieces are called.
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
        """Compile what is chosen of one graph."""
        pieces = pieces_of(gm) if self.cuts else [body_nodes(gm.graph)]
        chosen = _places(self.part, self.count, len(pieces))
        self.graphs.append([_words(piece) for piece in pieces])
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

    @property
    def count(self) -> int:
        """How many pieces there are so far."""
        return sum(map(len, self.graphs))

    def described(self, part: range) -> tuple[str, ...]:
        """Name the pieces of a part for a person, those of each graph in one line."""
        lines, before = [], 0
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
    """Which of so many pieces of a graph are in a part, if so many are in the graphs before it."""
    start, stop = (min(max(end - before, 0), pieces) for end in (part.start, part.stop))
    return range(start, stop)


def _numbered(places: range) -> str:
    if len(places) == 1:
        return f"segment {places[0]}"
    return f"segments {places[0]} to {places[-1]}"


def _listed(words: Sequence[str]) -> str:
    """The first and the last few."""
    if len(words) > SHOWN_OPERATIONS:
        half = SHOWN_OPERATIONS // 2
        words = [*words[:half], f"{len(words) - 2 * half} more", *words[-half:]]
    return ", ".join(words)


def pieces_of(gm: fx.GraphModule) -> list[list[fx.Node]]:
    """Divide the body of a graph wherever it can be cut.

    Args:
        gm: a graph of Dynamo's.

    Returns:
        The nodes of each piece, in order; one empty piece for a graph without a body.
    """
    body = body_nodes(gm.graph)
    blocked, held = blocked_positions(gm.graph), _emptied(gm.graph, body)
    starts = [place for place in range(1, len(body)) if blocked[place] is None and place not in held]
    return [body[start:end] for start, end in itertools.pairwise([0, *starts, len(body)])]


def _emptied(graph: fx.Graph, body: Sequence[fx.Node]) -> range:
    """Positions between the first and the last that read a list of inputs: compiled code empties it."""
    lists = [node for node in graph.find_nodes(op="placeholder") if isinstance(example_value(node), list)]
    reads = [i for i, node in enumerate(body) if not {*node.all_input_nodes}.isdisjoint(lists)]
    return range(reads[0] + 1, reads[-1] + 1) if reads else range(0)


def _words(nodes: Sequence[fx.Node]) -> list[str]:
    """What nodes call, and the line of the user's that the last of them comes from."""
    words = [str(getattr(node.target, "__name__", node.target)) for node in nodes]
    lines = [line for line in map(source_line, nodes) if line]
    return [*words[:-1], f"{words[-1]} ({lines[-1]})"] if lines else words


def source_line(node: fx.Node) -> str:
    """The innermost line outside of torch that a node comes from, like ``models.py:31``; else nothing."""
    root = str(Path(torch.__file__).parent)
    generated = "<"  # as in <eval_with_key>
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith((root, generated))]
    return f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""
