"""What a strategy for a captured graph is: it says why it cannot take one, plans it, and compiles it.

Strategies are peers: each answers the same three questions, and `planned_by` asks them in turn.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import fx

from ddpopt.graph.artifacts import say
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.bucket_rule import Specs
from ddpopt.planning.facts import GraphFacts, collect
from ddpopt.planning.join import GraphPlan
from ddpopt.planning.plan import Plan

Decide = Callable[[GraphFacts, bool], Plan]
"""Makes the plan of a graph from the facts about it; the flag says whether the graph stays whole."""


@dataclass(frozen=True)
class Captured:
    """A forward graph as Dynamo hands it to a backend.

    Attributes:
        gm: the graph.
        example_inputs: one value for each of its placeholders.
        specs: the parameters that DDP reduces, by ``id`` of the parameter.
        facts: the facts about `gm`.
        is_replayed: whether compiled code is tied to the addresses of its inputs, as CUDA graphs are.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[object]
    specs: Specs
    facts: GraphFacts
    is_replayed: bool = False

    @classmethod
    def of(
        cls, gm: fx.GraphModule, example_inputs: Sequence[object], specs: Specs, *, is_replayed: bool = False
    ) -> "Captured":
        """A captured graph, with the facts about it."""
        return cls(gm, example_inputs, specs, collect(gm, example_inputs, specs), is_replayed)

    @property
    def ends_in_break(self) -> bool:
        """Whether the graph ends in a graph break, so that the forward continues in another graph."""
        return bool(getattr(getattr(self.gm, "compile_subgraph_reason", None), "graph_break", False))


@dataclass(frozen=True)
class Planned:
    """A planned graph.

    Attributes:
        captured: the graph, perhaps with calls expanded if it will be cut.
        plan: made from its facts.
        strategy: the strategy that planned it.
        why_not: why a strategy that was preferred could not take it; None if there was none.
        completed: parameters whose gradients an earlier graph completes, though this one may read them.
        graph_plan: its part of the plan of the whole model; None if it has none.
        settled: whether it is known where buckets end. False if DDP may rebuild its own buckets in the order
            in which gradients arrive, or while some parameters are read by no graph yet: the graph's code may
            be reused for them, as one layer's code is for all layers where Dynamo compiles layer by layer.
    """

    captured: Captured
    plan: Plan
    strategy: "GraphStrategy"
    why_not: str | None = None
    completed: frozenset[str] = frozenset()
    graph_plan: GraphPlan | None = None
    settled: bool = True

    @property
    def inline(self) -> bool:
        """Whether the graph stays whole and hands its gradients over from inside its backward."""
        return self.strategy.stays_whole


@dataclass(frozen=True)
class Compilation:
    """How planned graphs are compiled.

    Attributes:
        compiler: the backend, with the mode and the options of ``torch.compile``.
        backend: the same backend without them.
        any_buckets: whether other buckets may be imposed later, for which no graph is compiled again.
        falls_back: whether a segment for which the backend fails may run uncompiled.
        level: the level at which it is logged that a strategy that was preferred could not take a graph.
    """

    compiler: CompilerFn
    backend: CompilerFn
    any_buckets: bool
    falls_back: bool = False
    level: int = logging.INFO


class GraphStrategy(Protocol):
    """A way to compile a graph so that gradients leave during its backward."""

    @property
    def stays_whole(self) -> bool:
        """Whether a graph is compiled in one piece."""

    def why_not(self, captured: Captured) -> str | None:
        """Why a graph cannot be compiled this way, for the user; None if it can be."""

    def plan(self, captured: Captured, decide: Decide) -> Planned:
        """Plan a graph that can be compiled this way."""

    def compile(self, planned: Planned, how: Compilation) -> Callable[..., Any]:
        """Compile a graph that this strategy planned; the callable has its inputs and outputs."""


def planned_by(strategies: Sequence[GraphStrategy], captured: Captured, decide: Decide) -> Planned:
    """Let the first strategy that can take a graph plan it.

    Raises:
        ValueError: none can; the message has the reason of the one that is preferred.
    """
    refusal: str | None = None
    for strategy in strategies:
        why_not = strategy.why_not(captured)
        if why_not is None:
            return replace(strategy.plan(captured, decide), why_not=refusal)
        refusal = refusal or why_not
    raise ValueError(f"no strategy takes this graph: {refusal}")


def compile_whole(why: str, planned: Planned, how: Compilation) -> Callable[..., Any]:
    """Compile a graph as it is, and say why."""
    say(f"a graph is compiled whole: {why}")
    return how.compiler(planned.captured.gm, planned.captured.example_inputs)
