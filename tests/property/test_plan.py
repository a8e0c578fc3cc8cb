"""Plans of drawn graphs: every gradient in one bucket, every bucket complete within one segment."""

import itertools
from collections.abc import Mapping, Sequence
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.graph.effects import mutated_inputs
from ddpopt.planning.bucket_rule import ParamSpec, rebuilt_buckets
from ddpopt.planning.facts import GraphFacts, ParamUse
from ddpopt.planning.join import GraphPlan, join_plans
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_for_buckets, plan_graph, plan_whole
from tests.support.drawn_graphs import facts_of, small_configs
from tests.support.graph_builder import SmallGraph, real_inputs
from tests.support.profiles import share
from tests.support.strategies import bucket_configs, graphs, parameter_lists


def names(plan: Plan) -> list[str]:
    return [name for bucket in plan.buckets for name in bucket.params]


@share(2)
@given(graphs(), small_configs())
def test_a_plan_of_a_graph_keeps_what_plans_promise(graph: SmallGraph, config: BucketConfig) -> None:
    facts = facts_of(graph)
    plan = plan_graph(facts, config)
    assert_each_parameter_is_in_one_bucket(plan, facts)
    assert_buckets_complete_in_one_segment_as_early_as_they_can(plan, facts)
    assert_segments_are_the_graph_and_cuts_lie_where_they_may(plan, facts)
    assert_in_order_of_backward(plan)
    assert plan_graph(facts_of(graph), config) == plan
    read_back = Plan.from_json(plan.to_json())
    assert read_back == plan
    assert read_back.fingerprint == plan.fingerprint


def assert_each_parameter_is_in_one_bucket(plan: Plan, facts: GraphFacts) -> None:
    assert sorted(names(plan)) == sorted(use.spec.name for use in facts.params)
    sizes = {use.spec.name: use.spec.nbytes for use in facts.params}
    assert [b.nbytes for b in plan.buckets] == [sum(sizes[name] for name in b.params) for b in plan.buckets]


def assert_buckets_complete_in_one_segment_as_early_as_they_can(plan: Plan, facts: GraphFacts) -> None:
    earliest = {use.spec.name: use.completes_at for use in facts.params}
    segment_of = {name: segment.index for segment in plan.segments for name in segment.nodes}
    for bucket in plan.buckets:
        assert {segment_of[facts.nodes[earliest[name]]] for name in bucket.params} == {bucket.segment}
    for segment in plan.segments[1:]:  # what cannot be parted from its last reader runs first, nothing else
        first = facts.nodes.index(segment.nodes[0])
        last_reader = min(earliest[name] for index in segment.buckets for name in plan.buckets[index].params)
        assert all(facts.blocked[place] is not None for place in range(first + 1, last_reader + 1))


def assert_segments_are_the_graph_and_cuts_lie_where_they_may(plan: Plan, facts: GraphFacts) -> None:
    assert tuple(itertools.chain.from_iterable(s.nodes for s in plan.segments)) == facts.nodes
    assert [cut.before for cut in plan.cuts] == [segment.nodes[0] for segment in plan.segments[1:]]
    for cut in plan.cuts:
        assert facts.blocked[facts.nodes.index(cut.before)] is None
        assert cut.reason
    assert all(segment.buckets for segment in plan.segments) or not plan.buckets


def assert_in_order_of_backward(plan: Plan) -> None:
    segments = [bucket.segment for bucket in plan.buckets]
    assert segments == sorted(segments, reverse=True)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))


@share(1)
@given(graphs())
def test_the_parameters_that_are_read_are_those_that_get_a_gradient(graph: SmallGraph) -> None:
    inputs = real_inputs(graph)
    outputs = [v for v in graph.gm(*inputs) if isinstance(v, torch.Tensor) and v.requires_grad]
    torch.stack([value.square().sum() for value in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    placeholders = [node.name for node in graph.gm.graph.find_nodes(op="placeholder")]
    trained = [
        graph.param_placeholders[name]
        for name, value in zip(placeholders, inputs, strict=True)
        if name in graph.param_placeholders and getattr(value, "grad", None) is not None
    ]
    assert all(value.grad.isfinite().all() for value in inputs if getattr(value, "grad", None) is not None)
    read = [use.spec.name for use in facts_of(graph).params]
    assert trained
    assert set(trained) <= set(read)
    if not any(map(mutated_inputs, graph.gm.graph.nodes)):  # what is written may be read by nobody
        assert sorted(read) == sorted(trained)


@share(1)
@given(graphs(), small_configs())
def test_given_buckets_are_kept_unchanged(graph: SmallGraph, config: BucketConfig) -> None:
    facts = facts_of(graph)
    ready = [use.spec for use in sorted(facts.params, key=lambda use: -use.completes_at)]
    given_buckets = [[ready[index].name for index in bucket] for bucket in rebuilt_buckets(ready, config)]
    plan = plan_for_buckets(facts, given_buckets)
    assert [list(bucket.params) for bucket in plan.buckets] == given_buckets
    assert_in_order_of_backward(plan)
    for bucket in plan.buckets:  # launched no earlier than its last gradient is there
        assert min(plan.segments_of(bucket)) >= bucket.segment


# ------------------------------------------------------------------------------------- several graphs


def graph_of(specs: Sequence[ParamSpec], config: BucketConfig, *, whole: bool) -> GraphPlan:
    """What is known of a graph with one node for each parameter."""
    uses = tuple(ParamUse(spec, (place,)) for place, spec in enumerate(specs))
    facts = GraphFacts(tuple(s.name for s in specs), uses, (None,) * len(specs))
    return GraphPlan(plan_whole(facts), facts.ready) if whole else GraphPlan(plan_graph(facts, config))


@share(1.5)
@given(parameter_lists(), bucket_configs(), st.randoms(use_true_random=False))
def test_every_parameter_of_a_model_is_in_exactly_one_bucket_of_the_joined_plan(
    params: tuple[ParamSpec, ...], config: BucketConfig, random: Random
) -> None:
    of_graph: Mapping[int, list[ParamSpec]] = {number: [] for number in range(4)}
    for spec in params:
        of_graph[random.randrange(4)].append(spec)  # those of graph 3 are read by none
    whole = [random.random() < 0.5 for _ in range(3)]
    graphs = [graph_of(of_graph[n], config, whole=whole[n]) for n in range(3)]
    plan = join_plans(graphs, params, config)
    assert sorted(names(plan)) == sorted(spec.name for spec in params)
    assert plan.unread == tuple(spec.name for spec in params if spec in of_graph[3])
    specs = {spec.name: spec for spec in params}
    for bucket in plan.buckets:
        kinds = {(specs[name].dtype, specs[name].device) for name in bucket.params}
        assert kinds == {(bucket.dtype, bucket.device)}
        assert len(bucket.params) == 1 or not any(specs[name].sparse for name in bucket.params)
    if sum(whole) < 2:  # graphs that stay whole share buckets
        assert {len(plan.segments_of(bucket)) for bucket in plan.buckets} <= {0, 1}
    assert_in_order_of_backward(plan)
    assert Plan.from_json(plan.to_json()) == plan
