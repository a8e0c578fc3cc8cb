"""What the graphs of one DDP module have said so far.

A model with graph breaks reaches the backend one graph at a time, and each has to be cut before the next
one is known. So each is planned for its own parameters, and when the first forward is over the plans are
joined into one for the reducer. From then on the buckets are fixed; later graphs (another shape, eval mode)
are cut where those buckets complete.

Invariant: no parameter completes in two graphs; its gradient is complete in the first one that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ddpopt.planning.bucket_rule import (
    BucketConfig,
    ParamSpec,
    rebuilt_buckets,
    specs_from_ddp,
)
from ddpopt.planning.eager_reads import noting_reads
from ddpopt.planning.expand_calls import Planned, plan_and_open
from ddpopt.planning.facts import GraphFacts, collect
from ddpopt.planning.join import join_plans, telling
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_for_buckets, plan_graph


@dataclass(frozen=True)
class Region:
    """One compiled graph of a model.

    Attributes:
        frame: which frame it comes from.
        plan: its own.
        read_before: the parameters from which its inputs were computed when it ran first.
    """

    frame: object
    plan: Plan
    read_before: set[str] = field(default_factory=set, compare=False)

    @property
    def params(self) -> frozenset[str]:
        """The parameters whose gradients complete in this graph."""
        return frozenset(name for segment in self.plan.segments for name in segment.params)


class Regions:
    """Plans one DDP module's graphs as they come, then the whole.

    Args:
        ddp: the module whose graphs are compiled.
    """

    def __init__(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        self.config = BucketConfig.from_ddp(ddp)
        self.specs = specs_by_id(ddp)
        self._regions: list[Region] = []

    def add(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Planned:
        """Plan one more graph of the current forward.

        A graph of the same frame that holds the same parameters is a recompilation, and takes the place
        of the earlier one.
        """
        frame = frame_of(gm)
        facts = collect(gm, example_inputs, self.specs)
        read = {use.spec.name for use in facts.params}
        self._regions = [r for r in self._regions if not (r.frame == frame and r.params and r.params <= read)]
        taken = frozenset[str]().union(*(region.params for region in self._regions))
        planned = plan_region(gm, example_inputs, self.specs, taken, self.config, facts=facts)
        self._regions.append(Region(frame, planned.plan))
        return planned

    def watching(
        self, planned: Planned, example_inputs: Sequence[object], run: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A callable like `run`, by which the joined plan knows what other code read in front of this graph.

        Args:
            planned: what `add` returned for a graph.
            example_inputs: one value for each of its placeholders; where none but parameters requires grad,
                there is nothing to know.
            run: takes the graph's inputs.
        """
        region = next((region for region in self._regions if region.plan is planned.plan), None)
        given = (v for v in example_inputs if isinstance(v, torch.Tensor) and id(v) not in self.specs)
        if region is None or not any(value.requires_grad for value in given):
            return run
        return noting_reads(run, self.specs, region.read_before)

    def joined(self) -> Plan | None:
        """The plan of the whole model, or None while no graph trains a parameter."""
        if not any(region.params for region in self._regions):
            return None
        told = telling([r.plan for r in self._regions], [r.read_before for r in self._regions])
        plans = [self._regions[place].plan for place in told]
        read_before = [self._regions[place].read_before for place in told]
        return join_plans(plans, tuple(self.specs.values()), self.config, read_before)


def specs_by_id(ddp: nn.parallel.DistributedDataParallel) -> dict[int, ParamSpec]:
    """What `ddp` reduces, by ``id`` of the parameter, in the order of the reducer's list."""
    by_name = {spec.name: spec for spec in specs_from_ddp(ddp)}
    ids = {name: id(param) for name, param in ddp.module.named_parameters() if name in by_name}
    return {ids[name]: spec for name, spec in by_name.items()}


def plan_region(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    specs: Mapping[int, ParamSpec],
    taken: frozenset[str],
    config: BucketConfig,
    graph: int = 0,
    facts: GraphFacts | None = None,
) -> Planned:
    """Plan one graph of a model that may have several.

    Args:
        gm: the graph.
        example_inputs: one value for each of its placeholders.
        specs: what DDP reduces, by ``id`` of the parameter, in the order of the reducer's list.
        taken: parameters that complete in earlier graphs.
        config: DDP's bucket limits.
        graph: which of the model's graphs this is, in forward order.
        facts: those of `gm`, where they have been read off already.

    Returns:
        The graph, perhaps with calls opened, its facts and its plan.
    """
    registered = tuple(specs.values())

    def decide(facts: GraphFacts) -> Plan:
        own = tuple(use for use in facts.params if use.spec.name not in taken)
        facts = replace(facts, params=own)
        done = taken.union(use.spec.name for use in facts.params)
        later = [spec for spec in registered if spec.name not in done] if ends_in_break(gm) else []
        return plan_graph(facts, config, graph, ahead=later[::-1])

    return plan_and_open(gm, example_inputs, specs, decide, facts)._replace(completed=taken)


def plan_for_ddp(
    ddp: nn.parallel.DistributedDataParallel, gm: fx.GraphModule, example_inputs: Sequence[object]
) -> Planned:
    """Cut a graph where the buckets that DDP will rebuild by itself become complete.

    DDP fills its buckets in the order in which gradients arrive, which this graph's readers foretell.
    """
    config = BucketConfig.from_ddp(ddp)

    def decide(facts: GraphFacts) -> Plan:
        ready = [use.spec for use in sorted(facts.params, key=lambda use: -use.completes_at)]
        buckets = [[ready[index] for index in bucket] for bucket in rebuilt_buckets(ready, config)]
        return plan_for_buckets(facts, buckets)

    return plan_and_open(gm, example_inputs, specs_by_id(ddp), decide)


def plan_for_imposed(
    ddp: nn.parallel.DistributedDataParallel,
    imposed: Plan,
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
) -> Planned:
    """Cut a later graph of a module whose reducer already follows a plan."""
    specs = specs_by_id(ddp)
    by_name = {spec.name: spec for spec in specs.values()}  # without what was replaced since
    kept = [[by_name[name] for name in bucket.params if name in by_name] for bucket in imposed.buckets]
    buckets = [bucket for bucket in kept if bucket]
    return plan_and_open(gm, example_inputs, specs, lambda facts: plan_for_buckets(facts, buckets))


def ends_in_break(gm: fx.GraphModule) -> bool:
    """Whether Dynamo broke the graph here, so that the forward goes on in another one."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def frame_of(gm: fx.GraphModule) -> object:
    """Which Python frame Dynamo traced `gm` from; equal for recompilations of one frame."""
    return getattr(gm.meta.get("dynamo_compile_id"), "frame_id", None)
