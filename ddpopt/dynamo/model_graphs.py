"""The graphs of one model that are known so far: live ones as they are compiled, or those of `ddpopt.plan`.

A model with graph breaks reaches the backend one graph at a time, and each is compiled before the next one
is known. A graph that will be cut is planned for its own parameters; one that stays whole shares buckets with
all graphs known so far. After the first forward, everything is joined into one plan for the reducer.
From then on the buckets are fixed; later graphs (another shape, eval mode) follow them.

Invariant: no parameter completes in two graphs; its gradient is complete in the first graph that reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpopt.ddp.specs import limits_of, specs_by_id
from ddpopt.dynamo.eager_reads import noting_reads
from ddpopt.inline.order_in_calls import ordered_within_calls
from ddpopt.inline.why_not import why_not_inline
from ddpopt.planning.bucket_rule import Specs, own_buckets
from ddpopt.planning.facts import GraphFacts, collect
from ddpopt.planning.join import GraphPlan, join_plans
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan, Strategy
from ddpopt.planning.planner import plan_for_buckets, plan_graph, plan_whole
from ddpopt.split.expand_calls import Expanded, expanded_and_planned


class Planned(NamedTuple):
    """A planned graph, with its facts and its plan.

    Attributes:
        gm: the graph, perhaps with calls expanded if it will be cut.
        example_inputs: one value for each of its placeholders.
        facts: the facts about `gm`.
        plan: made from the facts.
        why_split: why it is split, if that was not requested.
        inline: whether it stays whole and hands its gradients over from inside its backward.
        completed: parameters whose gradients an earlier graph completes, though this one may read them.
        graph_plan: its part of the plan of the whole model; None if it has none.
        settled: whether it is known where buckets end. False if DDP may rebuild its own buckets in the order
            in which gradients arrive, or while some parameters are read by no graph yet: the graph's code may
            be reused for them, as one layer's code is for all layers where Dynamo compiles layer by layer.
    """

    gm: fx.GraphModule
    example_inputs: Sequence[object]
    facts: GraphFacts
    plan: Plan
    why_split: str | None = None
    inline: bool = False
    completed: frozenset[str] = frozenset()
    graph_plan: GraphPlan | None = None
    settled: bool = True


class ModelGraphs:
    """Plans one model's graphs as they come, then the whole model.

    Args:
        specs: the parameters DDP reduces, by ``id`` of the parameter, in the order of the reducer's list.
        config: DDP's bucket limits.
    """

    def __init__(self, specs: Specs, config: BucketConfig) -> None:
        self.config = config
        self.specs = specs
        self._graphs: list[GraphPlan] = []

    def add(self, gm: fx.GraphModule, example_inputs: Sequence[Any], strategy: Strategy = "auto") -> Planned:
        """Plan one more graph of the current forward.

        A graph of the same frame with the same parameters is a recompilation, and replaces the earlier one.
        """
        # the Python frame that Dynamo traced; equal for its recompilations
        frame = getattr(gm.meta.get("dynamo_compile_id"), "frame_id", None)
        facts = collect(gm, example_inputs, self.specs)
        read = {use.spec.name for use in facts.params}
        self._graphs = [g for g in self._graphs if g.frame != frame or not g.params or g.params - read]
        taken = frozenset[str]().union(*(graph.params for graph in self._graphs))
        graph_plan = GraphPlan(Plan((), (), ()), frame=frame)
        # a later graph will fill the first buckets
        config = self.config.after_the_first if ends_in_break(gm) else self.config

        def decide(facts: GraphFacts, inline: bool) -> Plan:
            facts = replace(facts, params=tuple(use for use in facts.params if use.spec.name not in taken))
            if not inline:
                return plan_graph(facts, config)
            graph_plan.plan, graph_plan.ready = plan_whole(facts), facts.ready
            return plan_whole(facts, self._join([*self._graphs, graph_plan]).buckets)

        planned = _planned(gm, example_inputs, self.specs, strategy, facts, decide)
        if not planned.inline:
            graph_plan.plan = planned.plan
        self._graphs.append(graph_plan)
        settled = (taken | read).issuperset(spec.name for spec in self.specs.values())
        return planned._replace(completed=taken, graph_plan=graph_plan, settled=settled)

    def is_like(self, other: "ModelGraphs") -> bool:
        """Whether the graphs of one model could be the other's: the same parameters and bucket limits."""
        return self.config == other.config and [*self.specs.values()] == [*other.specs.values()]

    def with_read_tracking(self, planned: Planned, run: Callable[..., Any]) -> Callable[..., Any]:
        """A callable like `run` that records for the joined plan which parameters are read before this graph.

        Args:
            planned: the result of `add` for the graph. If only parameters among its inputs require grad,
                there is nothing to record.
            run: takes the graph's inputs.
        """
        tensors = (value for value in planned.example_inputs if isinstance(value, torch.Tensor))
        trained = any(value.requires_grad and id(value) not in self.specs for value in tensors)
        if planned.graph_plan is None or not trained:
            return run
        return noting_reads(run, self.specs, planned.graph_plan.read_before)

    def relevant(self) -> list[GraphPlan]:
        """The graphs that the plan covers: they complete a gradient, or show reads that no earlier one shows.

        On fake tensors autograd can be followed through earlier graphs; in compiled code it cannot.
        """
        found: list[GraphPlan] = []
        known = frozenset[str]()
        for graph in self._graphs:
            if graph.params or graph.read_before - known:
                found.append(graph)
            known |= graph.params | graph.read_before
        return found

    def joined(self) -> Plan | None:
        """The plan of the whole model, or None as long as no graph trains a parameter."""
        trains = any(graph.params for graph in self._graphs)
        return self._join(self.relevant()) if trains else None

    def _join(self, graphs: Sequence[GraphPlan]) -> Plan:
        return join_plans(graphs, tuple(self.specs.values()), self.config)


def _planned(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    specs: Specs,
    strategy: Strategy,
    facts: GraphFacts,
    decide: Callable[[GraphFacts, bool], Plan],
) -> Planned:
    """Plan a graph with the strategy that fits it; `decide` gets facts, and whether the graph stays whole."""
    why = None if strategy == "split" else why_not_inline(gm, facts.sources)
    if strategy != "split" and why is None:
        facts = ordered_within_calls(gm, facts, decide(facts, True))
        return Planned(gm, example_inputs, facts, decide(facts, True), inline=True)

    def planned(form: fx.GraphModule) -> Expanded:
        facts = collect(form, example_inputs, specs)
        return Expanded(form, facts, decide(facts, False))

    expanded, facts, plan = expanded_and_planned(Expanded(gm, facts, decide(facts, False)), planned)
    return Planned(expanded, example_inputs, facts, plan, why)


def plan_for_reducer(
    ddp: DDP, imposed: Plan | None, gm: fx.GraphModule, example_inputs: Sequence[object], strategy: Strategy
) -> Planned:
    """Plan a graph for the reducer's buckets: those of the `imposed` plan.

    Without such a plan DDP keeps its first buckets or rebuilds them. It fills the rebuilt ones in the order
    in which gradients arrive, which is predicted from this graph's readers.

    Raises:
        UnsupportedError: the reducer's parameters cannot be determined, or are no longer in the module.
    """
    specs, config = specs_by_id(ddp), limits_of(ddp)

    def decide(facts: GraphFacts, inline: bool) -> Plan:
        if imposed is not None:
            return plan_for_buckets(facts, [bucket.params for bucket in imposed.buckets], whole=inline)
        arriving = [use.spec for use in sorted(facts.params, key=lambda use: -use.completes_at)]
        buckets = own_buckets([*specs.values()], arriving, config)
        return plan_for_buckets(facts, [[spec.name for spec in bucket] for bucket in buckets], whole=inline)

    planned = _planned(gm, example_inputs, specs, strategy, collect(gm, example_inputs, specs), decide)
    return planned._replace(settled=imposed is not None)


def ends_in_break(gm: fx.GraphModule) -> bool:
    """Whether the graph ends in a graph break, so that the forward continues in another graph."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))
