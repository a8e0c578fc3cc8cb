"""Whatever was cut as a plan says, the certificate rejects every plan that breaks one promise of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from ddpopt.errors import CertificateError
from ddpopt.planning.facts import collect, parameter_names
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Bucket, Plan, Segment
from ddpopt.planning.planner import plan_graph
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from ddpopt.testing.profiles import share
from tests.graph_builder import SmallGraph
from tests.property.drawn_graphs import small_configs
from tests.property.strategies import graphs

Broken = Iterator[Plan]


def _with_bucket(plan: Plan, bucket: Bucket, **changes: Any) -> Plan:
    buckets = (replace(each, **changes) if each.index == bucket.index else each for each in plan.buckets)
    return replace(plan, buckets=tuple(buckets))


def _with_segment(plan: Plan, segment: Segment, **changes: Any) -> Plan:
    segments = (replace(each, **changes) if each.index == segment.index else each for each in plan.segments)
    return replace(plan, segments=tuple(segments))


def _without(items: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return items[:place] + items[place + 1 :]


def _more_segments(plan: Plan) -> Broken:
    last = plan.segments[-1]
    yield replace(plan, segments=(*plan.segments, Segment(last.index + 1, last.graph, (), (), ())))


def _fewer_segments(plan: Plan) -> Broken:
    if len(plan.segments) > 1:
        yield replace(plan, segments=plan.segments[:-1])


def _node_moved(plan: Plan) -> Broken:
    for before, after in pairwise(plan.segments):
        *kept, moved = before.nodes
        shorter = _with_segment(plan, before, nodes=tuple(kept))
        yield _with_segment(shorter, after, nodes=(moved, *after.nodes))


def _node_forgotten(plan: Plan) -> Broken:
    for segment in plan.segments:
        for place in range(len(segment.nodes)):
            yield _with_segment(plan, segment, nodes=_without(segment.nodes, place))


def _cut_forgotten(plan: Plan) -> Broken:
    for place in range(len(plan.cuts)):
        yield replace(plan, cuts=_without(plan.cuts, place))


def _cut_moved(plan: Plan) -> Broken:
    for place, cut in enumerate(plan.cuts):
        opened = next(segment for segment in plan.segments if segment.nodes[:1] == (cut.before,))
        for node in opened.nodes[1:2]:
            yield replace(plan, cuts=(*plan.cuts[:place], replace(cut, before=node), *plan.cuts[place + 1 :]))


def _parameter_in_no_bucket(plan: Plan) -> Broken:
    for bucket in plan.buckets:
        for place, name in enumerate(bucket.params):
            if name not in plan.unread:
                yield _with_bucket(plan, bucket, params=_without(bucket.params, place))


def _parameter_in_two_buckets(plan: Plan) -> Broken:
    for bucket, other in pairwise(plan.buckets):
        yield _with_bucket(plan, other, params=(*other.params, bucket.params[0]))


def _parameter_in_a_bucket_of_another_segment(plan: Plan) -> Broken:
    for bucket, other in pairwise(plan.buckets):
        if bucket.segment != other.segment:
            shorter = _with_bucket(plan, bucket, params=bucket.params[1:])
            yield _with_bucket(shorter, other, params=(*other.params, bucket.params[0]))


def _bucket_of_another_segment(plan: Plan) -> Broken:
    for bucket in plan.buckets:
        for segment in (bucket.segment - 1, bucket.segment + 1):
            if 0 <= segment < len(plan.segments):
                yield _with_bucket(plan, bucket, segment=segment)


def _buckets_swapped(plan: Plan) -> Broken:
    for place, (first, second) in enumerate(pairwise(plan.buckets)):
        if first.segment != second.segment:
            swapped = replace(second, index=first.index), replace(first, index=second.index)
            yield replace(plan, buckets=(*plan.buckets[:place], *swapped, *plan.buckets[place + 2 :]))


def _bucket_misnumbered(plan: Plan) -> Broken:
    for bucket in plan.buckets:
        yield _with_bucket(plan, bucket, index=len(plan.buckets))


def _parameter_not_listed(plan: Plan) -> Broken:
    for segment in plan.segments:
        for place in range(len(segment.params)):
            yield _with_segment(plan, segment, params=_without(segment.params, place))


def _bucket_not_listed(plan: Plan) -> Broken:
    for segment in plan.segments:
        if segment.buckets:
            yield _with_segment(plan, segment, buckets=segment.buckets[1:])


MUTATIONS: Mapping[str, Callable[[Plan], Broken]] = {
    "one more segment": _more_segments,
    "the last segment forgotten": _fewer_segments,
    "a node planned in the next segment": _node_moved,
    "a node forgotten": _node_forgotten,
    "a cut forgotten": _cut_forgotten,
    "a cut planned elsewhere": _cut_moved,
    "a parameter in no bucket": _parameter_in_no_bucket,
    "a parameter in two buckets": _parameter_in_two_buckets,
    "a parameter in a bucket of another segment": _parameter_in_a_bucket_of_another_segment,
    "a bucket of another segment": _bucket_of_another_segment,
    "two buckets swapped": _buckets_swapped,
    "a bucket misnumbered": _bucket_misnumbered,
    "a parameter not listed": _parameter_not_listed,
    "a bucket not listed": _bucket_not_listed,
}
"""For each way to break a plan, what yields every plan that is broken so."""


@share(0.4)
@given(graphs(), small_configs())
def test_every_mutation_of_a_plan_is_rejected(graph: SmallGraph, config: BucketConfig) -> None:
    specs = graph.specs()
    plan = plan_graph(collect(graph.gm, graph.example_values, specs), config)
    names = parameter_names(graph.gm, graph.example_values, specs)
    judge = partial(certify, graph.gm, partition(graph.gm, plan), names=names)
    judge(plan=plan)
    for name, mutate in MUTATIONS.items():
        for broken in mutate(plan):
            try:
                judge(plan=broken)
            except CertificateError:
                continue
            pytest.fail(f"accepted with {name}: {broken}")
