"""A graph as a program: steps over terms, the state they run in, and the values that cross between segments.

Invariant: frozen data. `ddpopt.proof.recompose` makes it; everything else in this package reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from ddpopt.graph.effects import mutated_inputs
from ddpopt.graph.nodes import MISSING, example_value
from ddpopt.proof.terms import Copy, Held, Item, Made, Term, leaves


class OpenSpan(NamedTuple):
    """An open autocast span: the node that opened it, and its arguments."""

    opener: str
    arguments: str


@dataclass(frozen=True)
class ProgramState:
    """The global state that nodes switch: grad mode, and the open autocast spans, outermost first."""

    grad_mode: bool = True
    autocast: tuple[OpenSpan, ...] = ()

    def __str__(self) -> str:
        spans = " in ".join(f"autocast({span.arguments})" for span in reversed(self.autocast))
        return f"{spans or 'no autocast'} and grad mode {'on' if self.grad_mode else 'off'}"


@dataclass(frozen=True)
class ProgramStep:
    """One computing node: its callee, its arguments as terms (`reads`: by node), its segment and state."""

    node: fx.Node
    segment: int
    callee: object
    args: tuple[Term, ...]
    kwargs: Mapping[str, Term]
    state: ProgramState
    reads: Mapping[fx.Node, Term]

    @property
    def written(self) -> tuple[Term, ...]:
        """The values that it may write to, without groups."""
        return tuple(leaf for node in mutated_inputs(self.node) for leaf in leaves(self.reads[node]))

    @property
    def given(self) -> tuple[Term, ...]:
        """The values that it is called with, without groups."""
        return tuple(leaf for term in (*self.args, *self.kwargs.values()) for leaf in leaves(term))

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name


def at(step: ProgramStep) -> str:
    """The location of a step, for messages."""
    return f"segment {step.segment}, node {step.name}"


class Crossing(NamedTuple):
    """An input of a segment: its placeholder, its term, and the copy that is passed instead, if any."""

    segment: int
    node: fx.Node
    term: Term
    copy: Copy | None

    def __str__(self) -> str:
        return f"segment {self.segment}, input {self.node.name}"


@dataclass(frozen=True)
class GraphSteps:
    """A graph read as a program.

    Attributes:
        inputs: its placeholders, in order.
        steps: its steps in execution order, one for each node of the original that it contains.
        result: the value that it returns.
        ends: the state after each segment, by the segment's index, in order.
        repeats: steps that segments repeat, because the value itself cannot cross a cut.
        crossings: the inputs of its segments, in order.
        returns: the value that each segment returns, by its index.
        undefined: a sentence for each value that is read but not defined.
        strays: a sentence for each node that is neither in the original nor needed by a cut.
    """

    inputs: tuple[fx.Node, ...]
    steps: tuple[ProgramStep, ...]
    result: Term
    ends: Mapping[int, ProgramState]
    repeats: tuple[ProgramStep, ...] = ()
    crossings: tuple[Crossing, ...] = ()
    returns: Mapping[int, Term] = field(default_factory=dict)
    undefined: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()


@dataclass(frozen=True)
class Original:
    """The graph that was cut, and its values.

    Attributes:
        program: the graph as a program of one segment.
        nodes: every node, by name.
        terms: the term of each value, by the name of its node.
        steps: every step, by name.
    """

    program: GraphSteps
    nodes: Mapping[str, fx.Node]
    terms: Mapping[str, Term]
    steps: Mapping[str, ProgramStep]

    def example(self, term: Term) -> object:
        """The example value of a term from tracing, or `MISSING`."""
        return example_of(self.nodes, term)


def example_of(nodes: Mapping[str, fx.Node], term: Term) -> object:
    """The example value of a term from tracing, or `MISSING`; `nodes` are the original's, by name."""
    if isinstance(term, Made):
        return example_value(nodes[term.name])
    if isinstance(term, Item):
        items = example_of(nodes, term.base)
        return items[term.index] if isinstance(items, (tuple, list)) else MISSING
    return term.example if isinstance(term, Held) else MISSING
