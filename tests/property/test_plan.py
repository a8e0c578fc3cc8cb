"""Plans of drawn graphs: every gradient in one bucket, every bucket complete within one segment."""

import itertools
from collections.abc import Mapping, Sequence
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpopt.facts import GraphFacts, ParamUse, collect
from ddpopt.join import join_plans
from ddpopt.mutation import mutated_inputs
from ddpopt.plan import Plan
from ddpopt.planner import plan_for_buckets, plan_graph
from ddpopt.reducer import BucketConfig, ParamSpec, rebuilt_buckets
from ddpopt.testing.graph_builder import SmallGraph, real_inputs
from ddpopt.testing.strategies import bucket_configs, graphs, parameter_lists


def small_configs() -> st.SearchStrategy[BucketConfig]:
    """Limits around the 16 to 128 bytes of a drawn graph's parameters."""
    sizes = st.sampled_from((1, 16, 17, 64, 80, 100, 128, 200, 10_000))
    lists = st.lists(sizes, max_size=3).map(tuple)
    return st.builds(BucketConfig, cap_bytes=sizes, first_bucket_bytes=sizes, cap_bytes_list=lists)


def specs_of(graph: SmallGraph) -> dict[int, ParamSpec]:
    """What DDP would reduce of a drawn graph's parameters."""
    values = zip(graph.gm.graph.find_nodes(op="placeholder"), graph.example_values, strict=True)
    return {
        id(value): ParamSpec(graph.param_placeholders[node.name], value.nbytes, "float32", "cpu")
        for node, value in values
        if node.name in graph.param_placeholders and value.requires_grad
    }


def facts_of(graph: SmallGraph) -> GraphFacts:
    return collect(graph.gm, graph.example_values, specs_of(graph))


def names(plan: Plan) -> list[str]:
    return [name for bucket in plan.buckets for name in bucket.params]


@settings(max_examples=300)
@given(graphs(), small_configs())
def test_each_read_parameter_stands_in_exactly_one_bucket(graph: SmallGraph, config: BucketConfig) -> None:
    facts = facts_of(graph)
    plan = plan_graph(facts, config)
    assert sorted(names(plan)) == sorted(use.spec.name for use in facts.params)
    sizes = {use.spec.name: use.spec.nbytes for use in facts.params}
    assert [b.nbytes for b in plan.buckets] == [sum(sizes[name] for name in b.params) for b in plan.buckets]


@settings(max_examples=300)
@given(graphs(), small_configs())
def test_each_bucket_is_complete_within_one_segment_as_early_as_it_can_be(
    graph: SmallGraph, config: BucketConfig
) -> None:
    facts = facts_of(graph)
    plan = plan_graph(facts, config)
    earliest = {use.spec.name: use.completes_at for use in facts.params}
    home = {name: segment.index for segment in plan.segments for name in segment.nodes}
    for bucket in plan.buckets:
        readers = [earliest[name] for name in bucket.params]
        assert {home[facts.nodes[reader]] for reader in readers} == {bucket.segment}
        if bucket.segment > 0:  # nothing that cannot be parted from the last reader runs before it
            opener = facts.nodes.index(plan.segments[bucket.segment].nodes[0])
            assert all(facts.blocked[place] is not None for place in range(opener + 1, min(readers) + 1))


@settings(max_examples=300)
@given(graphs(), small_configs())
def test_segments_are_the_graph_in_order_and_cuts_lie_where_they_may(
    graph: SmallGraph, config: BucketConfig
) -> None:
    facts = facts_of(graph)
    plan = plan_graph(facts, config)
    assert tuple(itertools.chain.from_iterable(s.nodes for s in plan.segments)) == facts.nodes
    assert [cut.before for cut in plan.cuts] == [segment.nodes[0] for segment in plan.segments[1:]]
    for cut in plan.cuts:
        assert facts.blocked[facts.nodes.index(cut.before)] is None
        assert cut.reason
    assert all(segment.buckets for segment in plan.segments) or not plan.buckets


@settings(max_examples=300)
@given(graphs(), small_configs())
def test_buckets_are_reduced_in_the_order_in_which_backward_completes_them(
    graph: SmallGraph, config: BucketConfig
) -> None:
    plan = plan_graph(facts_of(graph), config)
    segments = [bucket.segment for bucket in plan.buckets]
    assert segments == sorted(segments, reverse=True)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))


@settings(max_examples=200)
@given(graphs(), small_configs())
def test_plans_are_deterministic_and_survive_json(graph: SmallGraph, config: BucketConfig) -> None:
    plan, again = (plan_graph(facts_of(graph), config) for _ in range(2))
    assert plan == again
    read_back = Plan.from_json(plan.to_json())
    assert read_back == plan
    assert read_back.fingerprint == plan.fingerprint


@settings(max_examples=300)
@given(graphs())
def test_the_parameters_that_are_read_are_those_that_get_a_gradient(graph: SmallGraph) -> None:
    inputs = real_inputs(graph)
    outputs = [value for value in graph.gm(*inputs) if value.requires_grad]
    torch.stack([value.square().sum() for value in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    placeholders = [node.name for node in graph.gm.graph.find_nodes(op="placeholder")]
    trained = [
        graph.param_placeholders[name]
        for name, value in zip(placeholders, inputs, strict=True)
        if name in graph.param_placeholders and value.grad is not None
    ]
    read = [use.spec.name for use in facts_of(graph).params]
    assert set(trained) <= set(read)
    if not any(
        mutated_inputs(node) for node in graph.gm.graph.nodes
    ):  # what is written may be read by nobody
        assert sorted(read) == sorted(trained)


@settings(max_examples=300)
@given(graphs(), small_configs())
def test_buckets_that_are_given_are_kept_as_they_are(graph: SmallGraph, config: BucketConfig) -> None:
    facts = facts_of(graph)
    ready = [use.spec for use in sorted(facts.params, key=lambda use: -use.completes_at)]
    given_buckets = [[ready[index] for index in bucket] for bucket in rebuilt_buckets(ready, config)]
    plan = plan_for_buckets(facts, given_buckets)
    assert [list(bucket.params) for bucket in plan.buckets] == [[s.name for s in b] for b in given_buckets]
    segments = [bucket.segment for bucket in plan.buckets]
    assert segments == sorted(segments, reverse=True)
    for bucket in plan.buckets:  # launched no earlier than its last gradient is there
        assert min(plan.segments_of(bucket)) >= bucket.segment


# ------------------------------------------------------------------------------------- several graphs


def graph_of(specs: Sequence[ParamSpec], number: int, config: BucketConfig) -> Plan:
    """The plan of a graph with one node for each parameter."""
    uses = tuple(ParamUse(spec, (place,)) for place, spec in enumerate(specs))
    return plan_graph(GraphFacts(tuple(s.name for s in specs), uses, (None,) * len(specs)), config, number)


@settings(max_examples=300)
@given(parameter_lists(), bucket_configs(), st.randoms(use_true_random=False))
def test_every_parameter_of_a_model_stands_in_exactly_one_bucket_of_the_joined_plan(
    params: tuple[ParamSpec, ...], config: BucketConfig, random: Random
) -> None:
    of_graph: Mapping[int, list[ParamSpec]] = {number: [] for number in range(4)}
    for spec in params:
        of_graph[random.randrange(4)].append(spec)  # those of graph 3 are read by none
    plan = join_plans([graph_of(of_graph[n], n, config) for n in range(3)], params, config)
    assert sorted(names(plan)) == sorted(spec.name for spec in params)
    assert plan.unread == tuple(spec.name for spec in params if spec in of_graph[3])
    specs = {spec.name: spec for spec in params}
    for bucket in plan.buckets:
        assert {(specs[name].dtype, specs[name].device) for name in bucket.params} == {
            (bucket.dtype, bucket.device)
        }
        assert len(bucket.params) == 1 or not any(specs[name].sparse for name in bucket.params)
    assert plan.spread == 0
    assert Plan.from_json(plan.to_json()) == plan
