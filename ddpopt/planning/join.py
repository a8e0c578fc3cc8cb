"""Joining the plans of a model's graphs into the plan of the whole model.

A model with graph breaks has several graphs. Backward runs them last to first, so the gradients of the last
graph are ready first. The buckets of a graph that is cut are decided with its cuts; all other gradients
fill buckets by DDP's own rule in ready order, whichever graph they come from.

A parameter may be read by eager code before a graph, and by no earlier graph; then it is ready after that
graph's own parameters. A parameter without a known reader may be unused, or used after all graphs, or only on
another rank. It is assumed to be ready just before the parameter registered before it, as DDP assumes for
its initial buckets.

Invariant: every parameter that DDP reduces is in exactly one bucket.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ddpopt.planning.bucket_rule import ParamSpec, ready_buckets
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Bucket, Cut, Plan, Segment, cut_reason

UNREAD = "no compiled graph reads these parameters; they are placed by their order of registration"


@dataclass(eq=False)
class GraphPlan:
    """What the plan of the whole model needs to know about one graph.

    Attributes:
        plan: its segments; and its buckets, if it is cut.
        ready: its gradients in ready order, if it stays whole: their buckets are not decided yet.
        read_before: the parameters that its inputs were computed from when it first ran.
        frame: the Python frame that it was traced from.
    """

    plan: Plan
    ready: Sequence[ParamSpec] | None = None
    read_before: set[str] = field(default_factory=set)
    frame: object = None

    @property
    def params(self) -> frozenset[str]:
        """The parameters whose gradients complete in this graph."""
        return frozenset(name for segment in self.plan.segments for name in segment.params)


class _Part(NamedTuple):
    """Gradients that are ready together: a bucket fixed by a cut, or a single gradient without a reason."""

    specs: tuple[ParamSpec, ...]
    segment: int | None
    reason: str = ""


def join_plans(graphs: Sequence[GraphPlan], specs: Sequence[ParamSpec], config: BucketConfig) -> Plan:
    """Join the plans of a model's graphs into one plan.

    Args:
        graphs: in forward order; no parameter completes in two of them.
        specs: every parameter that DDP reduces, in registration order.
        config: DDP's bucket limits.

    Returns:
        A plan over all of `specs`.
    """
    between = _read_between(graphs, specs)
    elsewhere = frozenset(spec.name for group in between for spec in group)
    segments: list[Segment] = []
    cuts: dict[int, Cut] = {}  # by the segment that each one opens
    parts: list[_Part] = []  # later graphs first
    for number, (graph, before) in enumerate(zip(graphs, between, strict=True)):
        offset = len(segments)
        parts = [*_parts(graph, offset, specs, elsewhere), *(_Part((spec,), None) for spec in before), *parts]
        cuts.update((offset + k, replace(cut, graph=number)) for k, cut in enumerate(graph.plan.cuts, 1))
        for segment in graph.plan.segments:
            own = tuple(name for name in segment.params if name not in elsewhere)
            segments.append(replace(segment, index=segment.index + offset, graph=number, params=own))
    read = {name for segment in segments for name in segment.params}
    buckets = _buckets(_with_unread(parts, specs), config, read)
    completed: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        completed.setdefault(bucket.segment, []).append(bucket)
    for opened, (first, *_) in completed.items():
        if opened in cuts:  # the bucket's number in the whole plan
            cuts[opened] = replace(cuts[opened], reason=cut_reason(first.index, first.reason))
    segments = [replace(s, buckets=tuple(b.index for b in completed.get(s.index, ()))) for s in segments]
    return Plan(
        buckets=buckets,
        segments=tuple(segments),
        cuts=tuple(cuts.values()),
        unread=tuple(spec.name for spec in specs if spec.name not in read),
        policy=graphs[0].plan.policy if graphs else "plan",
    )


def _read_between(graphs: Sequence[GraphPlan], specs: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    """For each graph, the parameters read before it and by no earlier graph, last registered first."""
    graph_of = {name: number for number, graph in enumerate(graphs) for name in graph.params}
    found: list[list[ParamSpec]] = [[] for _ in graphs]
    for number, graph in enumerate(graphs):
        for spec in reversed(specs):
            if spec.name in graph.read_before and graph_of.get(spec.name, number) >= number:
                found[number].append(spec)
                graph_of[spec.name] = -1
    return found


def _parts(
    graph: GraphPlan, offset: int, specs: Sequence[ParamSpec], elsewhere: Collection[str]
) -> Iterator[_Part]:
    """The parameters that a graph reads, in ready order, except those that are read `elsewhere`."""
    if graph.ready is not None:
        yield from (_Part((spec,), offset) for spec in graph.ready if spec.name not in elsewhere)
        return
    by_name = {spec.name: spec for spec in specs if spec.name not in elsewhere}
    for bucket in graph.plan.buckets:
        own = tuple(by_name[name] for name in bucket.params if name in by_name)
        if own:
            yield _Part(own, offset + bucket.segment, bucket.reason)


def _with_unread(parts: Sequence[_Part], specs: Sequence[ParamSpec]) -> list[_Part]:
    """`parts` with each missing parameter inserted before the part of the parameter registered before it."""
    part_of = {spec.name: index for index, part in enumerate(parts) for spec in part.specs}
    before: list[list[_Part]] = [[] for _ in range(len(parts) + 1)]
    place = len(parts)  # registered before anything that is read: ready last
    for spec in specs:
        place = part_of.get(spec.name, place)
        if spec.name not in part_of:
            before[place].insert(0, _Part((spec,), None))
    merged: list[_Part] = []
    for part, run in zip(parts, before, strict=False):
        merged.extend((*run, part))
    return [*merged, *before[-1]]


def _buckets(parts: Sequence[_Part], config: BucketConfig, read: Collection[str]) -> tuple[Bucket, ...]:
    """The buckets, in the order in which their last gradients are ready."""
    rows = [(place, part.specs, part.reason) for place, part in enumerate(parts) if part.reason]
    rule = config.after_the_first if rows else config
    loose: dict[bool, list[tuple[int, ParamSpec]]] = {}
    for place, part in enumerate(parts):
        if not part.reason:
            # in unused-parameter mode, DDP can skip a bucket that has only unused parameters
            apart = not config.rebuilds and part.specs[0].name not in read
            loose.setdefault(apart, []).append((place, part.specs[0]))
    for pairs in loose.values():
        places, single = zip(*pairs, strict=True)
        for members, reason in ready_buckets(single, rule):
            specs = tuple(single[index] for index in members)
            known = any(spec.name in read for spec in specs)
            rows.append((places[max(members)], specs, reason if known else UNREAD))
    segments: list[int] = []
    segment = 0
    for part in reversed(parts):
        if part.segment is not None:  # what no graph reads: the segment that is ready next
            segment = part.segment
        segments.append(segment)
    return tuple(
        Bucket.of(index, specs, segments[-1 - place], reason)
        for index, (place, specs, reason) in enumerate(sorted(rows, key=lambda row: row[0]))
    )
