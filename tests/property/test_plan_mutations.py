"""Whatever was cut as a plan says, the certificate rejects every plan that breaks one promise of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from ddpopt.errors import CertificateError
from ddpopt.planning.facts import collect
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan, Segment
from ddpopt.planning.planner import plan_graph
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from ddpopt.testing.profiles import share
from tests.graph_builder import SmallGraph
from tests.property.drawn_graphs import small_configs
from tests.property.strategies import graphs
from tests.unit.tracing import parameter_names

Broken = Iterator[Plan]
Items = tuple[Any, ...]


def _changed(plan: Plan, listed: str, place: int, **changes: Any) -> Plan:
    """A plan of which one of the buckets, segments or cuts is another."""
    items = list(getattr(plan, listed))
    items[place] = replace(items[place], **changes)
    changed: dict[str, Any] = {listed: tuple(items)}
    return replace(plan, **changed)


def _shorter(items: Items) -> Iterator[Items]:
    """The items without the first one, without the second one, and so on."""
    return (items[:place] + items[place + 1 :] for place in range(len(items)))


def _left_out(plan: Plan) -> Broken:
    """A segment, a cut, or what a segment or a bucket lists."""
    if len(plan.segments) > 1:
        yield replace(plan, segments=plan.segments[:-1])
    yield from (replace(plan, cuts=cuts) for cuts in _shorter(plan.cuts))
    for place, segment in enumerate(plan.segments):
        for held in ("nodes", "params", "buckets"):
            for rest in _shorter(getattr(segment, held)):
                yield _changed(plan, "segments", place, **{held: rest})
    for place, bucket in enumerate(plan.buckets):
        for name, rest in zip(bucket.params, _shorter(bucket.params), strict=True):
            if name not in plan.unread:
                yield _changed(plan, "buckets", place, params=rest)


def _too_much(plan: Plan) -> Broken:
    """A segment more, or a parameter in two buckets."""
    last = plan.segments[-1]
    yield replace(plan, segments=(*plan.segments, Segment(last.index + 1, last.graph, (), (), ())))
    for place, (bucket, other) in enumerate(pairwise(plan.buckets)):
        yield _changed(plan, "buckets", place + 1, params=(*other.params, bucket.params[0]))


def _elsewhere(plan: Plan) -> Broken:
    """A node, a cut, a parameter or a bucket where it does not belong."""
    for place, (before, after) in enumerate(pairwise(plan.segments)):
        *kept, moved = before.nodes
        shorter = _changed(plan, "segments", place, nodes=tuple(kept))
        yield _changed(shorter, "segments", place + 1, nodes=(moved, *after.nodes))
        for node in after.nodes[1:2]:
            yield _changed(plan, "cuts", place, before=node)
    for place, (bucket, other) in enumerate(pairwise(plan.buckets)):
        if bucket.segment != other.segment:
            shorter = _changed(plan, "buckets", place, params=bucket.params[1:])
            yield _changed(shorter, "buckets", place + 1, params=(*other.params, bucket.params[0]))
            swapped = replace(other, index=bucket.index), replace(bucket, index=other.index)
            yield replace(plan, buckets=(*plan.buckets[:place], *swapped, *plan.buckets[place + 2 :]))
    for place, bucket in enumerate(plan.buckets):
        yield _changed(plan, "buckets", place, index=len(plan.buckets))
        for segment in (bucket.segment - 1, bucket.segment + 1):
            if 0 <= segment < len(plan.segments):
                yield _changed(plan, "buckets", place, segment=segment)


@share(0.4)
@given(graphs(), small_configs())
def test_every_mutation_of_a_plan_is_rejected(graph: SmallGraph, config: BucketConfig) -> None:
    specs = graph.specs()
    plan = plan_graph(collect(graph.gm, graph.example_values, specs), config)
    names = parameter_names(graph.gm, graph.example_values, specs)
    judge = partial(certify, graph.gm, partition(graph.gm, plan), names=names)
    judge(plan=plan)
    for mutate in (_left_out, _too_much, _elsewhere):
        for broken in mutate(plan):
            try:
                judge(plan=broken)
            except CertificateError:
                continue
            pytest.fail(f"accepted, with {mutate.__doc__} {broken}")
