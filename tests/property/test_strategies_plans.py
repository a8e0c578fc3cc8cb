"""What our strategies draw of plans: valid ones, and mutations that no certificate accepts."""

import re
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings

from ddpopt.errors import CertificateError
from ddpopt.planning.bucket_rule import BucketConfig, ParamSpec
from ddpopt.planning.facts import collect, parameter_names
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph
from ddpopt.proof.certificate import certify
from ddpopt.split.partition import partition
from ddpopt.testing.profiles import share
from tests.graph_builder import SmallGraph
from tests.property import plan_strategies
from tests.property.drawn_graphs import small_configs
from tests.property.plan_strategies import MUTATIONS, Mutation, all_mutations, mutations, plan_of
from tests.property.strategies import graphs, plans


@share(0.4)
@given(graphs(), small_configs())
def test_every_mutation_of_a_plan_is_rejected_beside_what_was_cut_as_planned(
    graph: SmallGraph, config: BucketConfig
) -> None:
    specs = graph.specs()
    plan = plan_graph(collect(graph.gm, graph.example_values, specs), config)
    names = parameter_names(graph.gm, graph.example_values, specs)
    judge = partial(certify, graph.gm, partition(graph.gm, plan), names=names)
    judge(plan=plan)
    for mutation in all_mutations(plan):
        try:
            judge(plan=mutation.plan)
        except CertificateError:
            continue
        pytest.fail(f"accepted: {mutation}")


SPECS = tuple(ParamSpec(name, 64, "float32", "cpu") for name in "abcdef")
TWO_EACH = plan_of(SPECS, (0,) * len(SPECS), BucketConfig(cap_bytes=128, first_bucket_bytes=128), "plan")


def test_each_mutation_of_a_plan_is_drawn_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[str] = Counter()
    reported: Counter[str] = Counter()
    monkeypatch.setattr(plan_strategies, "event", lambda name: reported.update([name]))

    @settings(max_examples=200, derandomize=True, database=None)
    @given(mutations(TWO_EACH))
    def look(mutation: Mutation) -> None:
        assert mutation.plan != TWO_EACH
        drawn[mutation.name] += 1

    look()
    assert set(drawn) == set(MUTATIONS)
    assert set(reported) == {f"mutation: {name}" for name in MUTATIONS}


def test_each_sort_of_plan_is_drawn_among_some_hundred() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=200, derandomize=True, database=None)
    @given(plans())
    def look(plan: Plan) -> None:
        seen[plan.policy] += 1
        seen["several graphs"] += len({segment.graph for segment in plan.segments}) > 1
        seen["several segments of a graph"] += bool(plan.cuts)
        seen["unread"] += bool(plan.unread)
        seen["several groups"] += len({(bucket.dtype, bucket.device) for bucket in plan.buckets}) > 1

    look()
    assert len(seen) == 6
    assert min(seen.values()) > 5, seen


@share(1)
@given(plans())
def test_a_drawn_plan_holds_each_parameter_once_and_survives_json(plan: Plan) -> None:
    names = [name for bucket in plan.buckets for name in bucket.params]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"layers\.\d+\.weight", name) for name in names)
    assert Plan.from_json(plan.to_json()) == plan
