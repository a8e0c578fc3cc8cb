"""Compile a chosen part of a model, and run the rest as it is.

A graph falls into pieces wherever planning allows a cut; neighbours that are chosen are compiled as
one. So everything chosen is the whole graph as Dynamo hands it over, and nothing chosen is no compiling.

Invariant: equal models give equal pieces, so that a choice made in one run means the same in the next. The
pieces of a backward that compiled autograd captures are equal only where what its forward compiles is.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
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
WHOLE = -1
"""The place of a piece that is all of its graph."""
FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


class Piece(NamedTuple):
    """A piece of a graph: which graph, in the order in which they are compiled, and its place, or `WHOLE`."""

    graph: int
    place: int


class Run(NamedTuple):
    """Neighbouring pieces of one graph, the last one included."""

    graph: int
    first: int
    last: int


class Seen(NamedTuple):
    """A graph that was compiled.

    Attributes:
        pieces: what the nodes of each piece are called.
        is_backward: whether it is a backward that compiled autograd captured.
    """

    pieces: list[list[str]]
    is_backward: bool


class ChosenPieces:
    """A Dynamo backend that compiles the pieces chosen, and runs all others as they are.

    Args:
        compiler: what compiles them.
        chosen: the pieces; None for all.
        cuts: whether graphs fall into pieces at all; else each graph is one, as the mode has cut it.

    Attributes:
        graphs: those so far.
    """

    def __init__(
        self, compiler: CompilerFn, chosen: Iterable[Piece] | None = None, *, cuts: bool = True
    ) -> None:
        self.__name__ = getattr(compiler, "__name__", type(compiler).__name__)
        self.compiler = compiler
        self.chosen = None if chosen is None else frozenset(chosen)
        self.cuts = cuts
        self.graphs: list[Seen] = []

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], **options: Any
    ) -> Callable[..., Any]:
        """Compile what is chosen of one graph."""
        number, pieces = len(self.graphs), pieces_of(gm, cuts=self.cuts)
        backward = compiled_autograd.in_compiled_autograd_region
        self.graphs.append(Seen([_words(gm, piece) for piece in pieces], backward))
        if self.chosen is None or Piece(number, WHOLE) in self.chosen:
            return self.compiler(gm, example_inputs, **options)
        wanted = [Piece(number, index) in self.chosen for index in range(len(pieces))]
        if all(wanted):
            return self.compiler(gm, example_inputs, **options)
        if not any(wanted):
            return gm.forward
        starts = [i for i in range(1, len(wanted)) if wanted[i] != wanted[i - 1]]
        flags = iter([wanted[0], *(wanted[start] for start in starts)])

        def choose(segment: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., Any]:
            return self.compiler(segment, inputs, **options) if next(flags) else segment.forward

        stitched = cut_before(gm, [pieces[start][0] for start in starts])
        return compile_segments(
            stitched, example_inputs, choose, [None] * (len(starts) + 1), share=False
        ).call

    @property
    def wholes(self) -> list[Piece]:
        """Every graph so far, whole."""
        return [Piece(graph, WHOLE) for graph in range(len(self.graphs))]

    def pieces(self, graph: int) -> list[Piece]:
        """Every piece of one graph."""
        return [Piece(graph, index) for index in range(len(self.graphs[graph].pieces))]

    def described(self, chosen: Iterable[Piece]) -> tuple[str, ...]:
        """Name pieces for a person; neighbours in one line."""
        return tuple(self._describe(run) for run in runs_of(chosen))

    def _describe(self, run: Run) -> str:
        pieces, is_backward = self.graphs[run.graph]
        first, last = (0, len(pieces) - 1) if run.first == WHOLE else (run.first, run.last)
        operations = _listed(list(itertools.chain.from_iterable(pieces[first : last + 1])))
        if not self.cuts:
            return f"compiled segment {run.graph} of {len(self.graphs)}: {operations}"
        kind = "captured backward" if is_backward else "graph"
        number = f"segment {first}" if first == last else f"segments {first} to {last}"
        return f"{kind} {run.graph}, {number} of {len(pieces)}: {operations}"


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


def cut_before(gm: fx.GraphModule, openers: Sequence[fx.Node]) -> fx.GraphModule:
    """Cut a graph in front of nodes; the result calls ``segment_0``, ``segment_1`` and so on."""
    cuts = tuple(Cut(0, node.name, "to find what is wrong") for node in openers)
    return partition(gm, Plan((), (), cuts))


def runs_of(pieces: Iterable[Piece]) -> list[Run]:
    """Join neighbours.

    >>> runs_of([Piece(0, 3), Piece(0, 4), Piece(1, 0)])
    [Run(graph=0, first=3, last=4), Run(graph=1, first=0, last=0)]
    """
    runs: list[Run] = []
    for piece in sorted(pieces):
        if runs and (runs[-1].graph, runs[-1].last + 1) == piece:
            runs[-1] = runs[-1]._replace(last=piece.place)
        else:
            runs.append(Run(piece.graph, piece.place, piece.place))
    return runs


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
