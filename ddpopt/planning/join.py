"""The plan of a whole model, from what is known of its graphs.

A model with graph breaks has several graphs. Backward runs them last to first, so the gradients of the last
graph are ready first. The buckets of a graph that is cut are decided with its cuts; all other gradients
fill buckets by DDP's own rule in the order of their readiness, whichever graph they come from.

A parameter may be read by ordinary code before a graph, and by no graph before that code; then it is ready
after that graph's own. One that nobody is known to read may be unused, or used after all graphs, or on
another rank only. It is taken to be ready just before the parameter registered before it, as DDP assumes for
its initial buckets.

Invariant: every parameter that DDP reduces is in exactly one bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ddpopt.planning.bucket_rule import ParamSpec, ready_buckets
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Bucket, Cut, Plan, Segment, cut_reason

UNREAD = "no compiled graph reads these parameters; they are placed by their order of registration"


class GraphPlan(NamedTuple):
    """What the plan of the whole model needs to know of one graph.

    Attributes:
        plan: its segments; and its buckets, if it is cut.
        ready: its gradients in the order of readiness, if it stays whole: their buckets are still to be made.
        read_before: the parameters from which its inputs were computed, whoever read them.
    """

    plan: Plan
    ready: Sequence[ParamSpec] | None = None
    read_before: Collection[str] = ()

    @property
    def params(self) -> frozenset[str]:
        """The parameters whose gradients complete in this graph."""
        return frozenset(name for segment in self.plan.segments for name in segment.params)


class _Part(NamedTuple):
    """Gradients that are ready together: a bucket that a cut fixes, or a single gradient without a reason."""

    specs: tuple[ParamSpec, ...]
    segment: int | None
    reason: str = ""


def join_plans(graphs: Sequence[GraphPlan], specs: Sequence[ParamSpec], config: BucketConfig) -> Plan:
    """Join what is known of a model's graphs into one plan.

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
    for number, (plan, *_) in enumerate(graphs):
        offset = len(segments)
        for segment in plan.segments:
            own = tuple(name for name in segment.params if name not in elsewhere)
            segments.append(replace(segment, index=segment.index + offset, graph=number, params=own))
    read = {name for segment in segments for name in segment.params}
    parts = _with_unread(list(_parts(graphs, specs, between, elsewhere)), specs)
    buckets = _buckets(parts, config, read)
    cuts = [replace(cut, graph=number) for number, (plan, *_) in enumerate(graphs) for cut in plan.cuts]
    return Plan(
        buckets=buckets,
        segments=_completed(segments, buckets),
        cuts=_renumbered(cuts, segments, buckets),
        unread=tuple(spec.name for spec in specs if spec.name not in read),
        policy=graphs[0].plan.policy if graphs else "plan",
    )


def _read_between(graphs: Sequence[GraphPlan], specs: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    """For each graph, what code before it reads and no earlier graph does, registered last first."""
    graph_of = {name: number for number, graph in enumerate(graphs) for name in graph.params}
    found: list[list[ParamSpec]] = [[] for _ in graphs]
    for number, graph in enumerate(graphs):
        for spec in reversed(specs):
            if spec.name in graph.read_before and graph_of.get(spec.name, number) >= number:
                found[number].append(spec)
                graph_of[spec.name] = -1
    return found


def _parts(
    graphs: Sequence[GraphPlan],
    specs: Sequence[ParamSpec],
    between: Sequence[Sequence[ParamSpec]],
    elsewhere: Collection[str],
) -> Iterator[_Part]:
    """What is known to be read, in ready order; `elsewhere` are the names in `between`."""
    by_name = {spec.name: spec for spec in specs}
    first = sum(len(graph.plan.segments) for graph in graphs)
    for (plan, ready, _), before in zip(reversed(graphs), reversed(between), strict=True):
        first -= len(plan.segments)
        if ready is not None:
            yield from (_Part((spec,), first) for spec in ready if spec.name not in elsewhere)
        else:
            for bucket in plan.buckets:
                own = tuple(by_name[name] for name in bucket.params if name not in elsewhere)
                if own:
                    yield _Part(own, first + bucket.segment, bucket.reason)
        yield from (_Part((spec,), None) for spec in before)


def _with_unread(parts: Sequence[_Part], specs: Sequence[ParamSpec]) -> list[_Part]:
    """`parts` with every other parameter before the part with the parameter registered before it."""
    home = {spec.name: index for index, part in enumerate(parts) for spec in part.specs}
    before: list[list[_Part]] = [[] for _ in range(len(parts) + 1)]
    place = len(parts)  # registered before anything that is read: ready last
    for spec in specs:
        place = home.get(spec.name, place)
        if spec.name not in home:
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
            # where it looks for unused parameters, DDP can leave out a bucket that has no others
            apart = not config.rebuilds and part.specs[0].name not in read
            loose.setdefault(apart, []).append((place, part.specs[0]))
    for pairs in loose.values():
        places, single = zip(*pairs, strict=True)
        for members, reason in ready_buckets(single, rule):
            specs = tuple(single[index] for index in members)
            known = any(spec.name in read for spec in specs)
            rows.append((places[max(members)], specs, reason if known else UNREAD))
    segments: list[int] = []  # what no graph reads counts to the segment that is ready next
    for part in reversed(parts):
        segments.append(part.segment if part.segment is not None else segments[-1] if segments else 0)
    return tuple(
        Bucket.of(index, specs, segments[-1 - place], reason)
        for index, (place, specs, reason) in enumerate(sorted(rows, key=lambda row: row[0]))
    )


def _renumbered(
    cuts: Sequence[Cut], segments: Sequence[Segment], buckets: Sequence[Bucket]
) -> tuple[Cut, ...]:
    """The cuts, whose reasons name buckets by the numbers that they have in the whole plan."""
    opened = {(segment.graph, segment.nodes[0]): segment.index for segment in segments if segment.nodes}
    first = {bucket.segment: bucket for bucket in reversed(buckets)}

    def renumber(cut: Cut) -> Cut:
        bucket = first.get(opened[cut.graph, cut.before])
        return cut if bucket is None else replace(cut, reason=cut_reason(bucket.index, bucket.reason))

    return tuple(renumber(cut) for cut in cuts)


def _completed(segments: Sequence[Segment], buckets: Sequence[Bucket]) -> tuple[Segment, ...]:
    """The segments, each with the new numbers of the buckets that it completes."""
    by_segment: dict[int, list[int]] = {segment.index: [] for segment in segments}
    for bucket in buckets:
        by_segment.setdefault(bucket.segment, []).append(bucket.index)
    return tuple(replace(segment, buckets=tuple(by_segment[segment.index])) for segment in segments)
