"""The plan of a whole model: the plans of its graphs, one behind the other, and what no graph reads.

A model with graph breaks has several graphs, each planned for its own parameters. Backward runs them last
to first, so the buckets of the last graph are reduced first.

A parameter may be read by ordinary code in front of a graph, and by no graph in front of that code; then it
is ready behind that graph's own. One that nobody is known to read may be unused, or used behind all graphs,
or on another rank only. It is taken to be ready just before the parameter registered in front of it, as DDP
assumes for its initial buckets.

Invariant: every parameter that DDP reduces stands in exactly one bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, replace

from ddpopt.planning.bucket_rule import BucketConfig, ParamSpec
from ddpopt.planning.plan import Bucket, Cut, Plan, Segment, cut_reason


def telling(plans: Sequence[Plan], read_before: Sequence[Collection[str]]) -> tuple[int, ...]:
    """Which graphs the plan of the whole model is about.

    Args:
        plans: one for each graph, in forward order.
        read_before: for each, the parameters from which its inputs were computed.

    Returns:
        Places of those that complete a gradient, or that tell of reads before them.
    """
    pairs = enumerate(zip(plans, read_before, strict=True))
    return tuple(place for place, (plan, before) in pairs if before or any(s.params for s in plan.segments))


def join_plans(
    plans: Sequence[Plan],
    specs: Sequence[ParamSpec],
    config: BucketConfig,
    read_before: Sequence[Collection[str]] = (),
) -> Plan:
    """Join the plans of a model's graphs into one.

    Args:
        plans: one for each graph, in forward order; no parameter in two of them.
        specs: every parameter that DDP reduces, in registration order.
        config: DDP's bucket limits, for the parameters that no graph reads.
        read_before: for each of `plans`, the parameters from which the inputs of its graph were computed,
            whoever read them; empty if nothing is known.

    Returns:
        A plan over all of `specs`.
    """
    between = _read_between(plans, specs, read_before)
    elsewhere = {spec.name for group in between for spec in group}
    segments: list[Segment] = []
    for graph, plan in enumerate(plans):
        offset = len(segments)
        for segment in plan.segments:
            own = tuple(name for name in segment.params if name not in elsewhere)
            segments.append(replace(segment, index=segment.index + offset, graph=graph, params=own))
    joiner = _Joiner(config.rebuilt_limits)
    for part in _parts(plans, specs, config.rebuilt_limits[-1], between, elsewhere):
        joiner.add(part)
    buckets = _numbered(joiner.finish())
    read = {name for segment in segments for name in segment.params}
    cuts = [replace(cut, graph=graph) for graph, plan in enumerate(plans) for cut in plan.cuts]
    return Plan(
        buckets=buckets,
        segments=_completed(segments, buckets),
        cuts=_renumbered(cuts, segments, buckets),
        unread=tuple(spec.name for spec in specs if spec.name not in read),
        policy=plans[0].policy if plans else "plan",
    )


@dataclass(frozen=True)
class _Part:
    """Gradients that complete together: a graph's bucket, or one parameter that no graph reads."""

    specs: tuple[ParamSpec, ...]
    segment: int | None
    full: bool
    reason: str


@dataclass
class _Open:
    """A bucket that is still being filled, from parts of one graph at most."""

    specs: list[ParamSpec]
    segment: int | None
    reason: str

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


UNREAD = "no compiled graph reads these parameters; they are placed by their order of registration"
BETWEEN = "no compiled graph reads these parameters first; code in front of one does"


def _read_between(
    plans: Sequence[Plan], specs: Sequence[ParamSpec], read_before: Sequence[Collection[str]]
) -> list[list[ParamSpec]]:
    """For each graph, what code in front of it reads and no earlier graph does, registered last first."""
    graph_of = {name: g for g, plan in enumerate(plans) for s in plan.segments for name in s.params}
    found: list[list[ParamSpec]] = [[] for _ in plans]
    for graph, names in enumerate(read_before):
        for spec in reversed(specs):
            if spec.name in names and graph_of.get(spec.name, graph) >= graph:
                found[graph].append(spec)
                graph_of[spec.name] = -1
    return found


def _parts(
    plans: Sequence[Plan],
    specs: Sequence[ParamSpec],
    cap: int,
    between: Sequence[Sequence[ParamSpec]],
    elsewhere: Set[str],
) -> list[_Part]:
    """Everything that has to stand in a bucket, in ready order; `elsewhere` are the names in `between`."""
    by_name = {spec.name: spec for spec in specs}
    graph_parts: list[_Part] = []
    offset = sum(len(plan.segments) for plan in plans)
    for plan, in_front in zip(reversed(plans), reversed(between), strict=True):
        offset -= len(plan.segments)
        for bucket in plan.buckets:
            members = tuple(by_name[name] for name in bucket.params if name not in elsewhere)
            if not members:
                continue
            nbytes = sum(spec.nbytes for spec in members)
            whole = nbytes == bucket.nbytes and bucket is not plan.buckets[-1]
            full = whole or nbytes >= cap or members[0].sparse
            graph_parts.append(_Part(members, bucket.segment + offset, full, bucket.reason))
        graph_parts.extend(_Part((spec,), None, spec.sparse, BETWEEN) for spec in in_front)
    return _with_unread(graph_parts, specs)


def _with_unread(parts: Sequence[_Part], specs: Sequence[ParamSpec]) -> list[_Part]:
    """`parts` with every other parameter in front of the part that it is registered behind."""
    home = {spec.name: index for index, part in enumerate(parts) for spec in part.specs}
    before: list[list[_Part]] = [[] for _ in range(len(parts) + 1)]
    place = len(parts)  # registered before anything that is read: ready last
    for spec in specs:
        place = home.get(spec.name, place)
        if spec.name not in home:
            before[place].insert(0, _Part((spec,), None, spec.sparse, UNREAD))
    merged: list[_Part] = []
    for part, run in zip(parts, before, strict=False):
        merged.extend((*run, part))
    return [*merged, *before[-1]]


class _Joiner:
    """DDP's rule over parts: what does not fill a bucket shares one with what comes next.

    A bucket never holds parts of two graphs, for it would wait on a segment of each.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = limits
        self._open: dict[tuple[str, str], _Open] = {}
        self.buckets: list[_Open] = []

    def add(self, part: _Part) -> None:
        key = (part.specs[0].dtype, part.specs[0].device)
        opened = self._open.pop(key, None)
        if opened is not None and (part.specs[0].sparse or None not in (opened.segment, part.segment)):
            self.buckets.append(opened)
            opened = None
        bucket = _Open([*(opened.specs if opened else ()), *part.specs], part.segment, part.reason)
        if bucket.segment is None and opened is not None:
            bucket.segment, bucket.reason = opened.segment, opened.reason
        if part.full or bucket.nbytes >= self._limits[min(len(self.buckets), len(self._limits) - 1)]:
            self.buckets.append(bucket)
        else:
            self._open[key] = bucket

    def finish(self) -> list[_Open]:
        return [*self.buckets, *self._open.values()]


def _numbered(joined: Sequence[_Open]) -> tuple[Bucket, ...]:
    """Buckets with their numbers; what no graph reads counts to the segment that is ready next."""
    rows: list[Bucket] = []
    segment = 0
    for index, bucket in reversed(list(enumerate(joined))):
        segment = segment if bucket.segment is None else bucket.segment
        names = tuple(spec.name for spec in bucket.specs)
        first = bucket.specs[0]
        rows.append(Bucket(index, names, bucket.nbytes, first.dtype, first.device, segment, bucket.reason))
    return tuple(reversed(rows))


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
