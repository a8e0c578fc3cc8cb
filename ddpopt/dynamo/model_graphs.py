"""The graphs of one model that are known so far: live ones as they are compiled, or those of `ddpopt.plan`.

A model with graph breaks reaches the backend one graph at a time, and each is compiled before the next one
is known. A graph that will be cut is planned for its own parameters; one that stays whole shares buckets with
all graphs known so far. After the first forward, everything is joined into one plan for the reducer.
From then on the buckets are fixed; later graphs (another shape, eval mode) follow them.

Invariant: no parameter completes in two graphs; its gradient is complete in the first graph that reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpopt.ddp.specs import limits_of
from ddpopt.dynamo.eager_reads import noting_reads
from ddpopt.inline.strategy import Inline
from ddpopt.planning.bucket_rule import Specs, own_buckets
from ddpopt.planning.facts import GraphFacts
from ddpopt.planning.join import GraphPlan, join_plans
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_for_buckets, plan_graph, plan_whole
from ddpopt.split.strategy import Split
from ddpopt.strategies.protocol import Captured, GraphStrategy, Planned, planned_by

Strategies = Sequence[GraphStrategy]
INLINE = Inline()
SPLIT = Split()
STRATEGIES: Mapping[str, Strategies] = {
    "auto": (INLINE, SPLIT),
    "inline": (INLINE, SPLIT),
    "split": (SPLIT,),
}
"""By the user's choice, the strategies in the order in which they are asked; `Split` takes every graph."""


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

    def add(self, captured: Captured, strategies: Strategies) -> Planned:
        """Plan one more graph of the current forward, with the first of some strategies that can take it.

        A graph of the same frame with the same parameters is a recompilation, and replaces the earlier one.
        """
        # the Python frame that Dynamo traced; equal for its recompilations
        frame = getattr(captured.gm.meta.get("dynamo_compile_id"), "frame_id", None)
        read = {use.spec.name for use in captured.facts.params}
        self._graphs = [g for g in self._graphs if g.frame != frame or not g.params or g.params - read]
        taken = frozenset[str]().union(*(graph.params for graph in self._graphs))
        graph_plan = GraphPlan(Plan((), (), ()), frame=frame)
        # a later graph will fill the first buckets
        config = self.config.after_the_first if captured.ends_in_break else self.config

        def decide(facts: GraphFacts, inline: bool) -> Plan:
            facts = replace(facts, params=tuple(use for use in facts.params if use.spec.name not in taken))
            if not inline:
                return plan_graph(facts, config)
            graph_plan.plan = plan_whole(facts)
            graph_plan.ready = facts.ready
            return plan_whole(facts, self._join([*self._graphs, graph_plan]).buckets)

        planned = planned_by(strategies, captured, decide)
        if not planned.inline:
            graph_plan.plan = planned.plan
        self._graphs.append(graph_plan)
        settled = (taken | read).issuperset(spec.name for spec in self.specs.values())
        return replace(planned, completed=taken, graph_plan=graph_plan, settled=settled)

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
        tensors = (value for value in planned.captured.example_inputs if isinstance(value, torch.Tensor))
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


def plan_for_reducer(ddp: DDP, imposed: Plan | None, captured: Captured, strategies: Strategies) -> Planned:
    """Plan a graph for the reducer's buckets: those of the `imposed` plan.

    Without such a plan DDP keeps its first buckets or rebuilds them. It fills the rebuilt ones in the order
    in which gradients arrive, which is predicted from this graph's readers.

    Raises:
        UnsupportedError: the reducer's parameters cannot be determined, or are no longer in the module.
    """
    config = limits_of(ddp)

    def decide(facts: GraphFacts, inline: bool) -> Plan:
        if imposed is not None:
            return plan_for_buckets(facts, [bucket.params for bucket in imposed.buckets], whole=inline)
        arriving = [use.spec for use in sorted(facts.params, key=lambda use: -use.completes_at)]
        buckets = own_buckets([*captured.specs.values()], arriving, config)
        return plan_for_buckets(facts, [[spec.name for spec in bucket] for bucket in buckets], whole=inline)

    return replace(planned_by(strategies, captured, decide), settled=imposed is not None)
