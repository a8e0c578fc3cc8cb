"""What is known of a model's graphs, joined: every parameter is in one bucket, read or not."""

from typing import Any

import pytest

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.facts import GraphFacts, ParamUse
from ddpopt.planning.join import UNREAD, GraphPlan, join_plans
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph, plan_whole

CAP_100 = BucketConfig(cap_bytes=100, first_bucket_bytes=100)


def spec(name: str, nbytes: int = 100, dtype: str = "float32") -> ParamSpec:
    return ParamSpec(name, nbytes, dtype, "cpu")


def facts(*specs: ParamSpec) -> GraphFacts:
    """Those of a graph with one node for each parameter, in forward order."""
    uses = tuple(ParamUse(spec, (position,)) for position, spec in enumerate(specs))
    return GraphFacts(tuple(f"reads_{spec.name}" for spec in specs), uses, (None,) * len(specs))


def cut(*specs: ParamSpec, before: str = "") -> GraphPlan:
    """A graph that is cut."""
    return GraphPlan(plan_graph(facts(*specs), CAP_100), read_before={*before.split()})


def whole(*specs: ParamSpec, before: str = "") -> GraphPlan:
    """A graph that stays whole."""
    return GraphPlan(plan_whole(facts(*specs)), facts(*specs).ready, {*before.split()})


def buckets(plan: Plan) -> list[str]:
    return [" ".join(bucket.params) for bucket in plan.buckets]


def joined(graphs: list[GraphPlan], *specs: ParamSpec, config: BucketConfig = CAP_100) -> Plan:
    return join_plans(graphs, specs, config)


# ----------------------------------------------------------------------------------- several graphs


def test_graphs_that_are_cut_share_no_bucket_and_whole_ones_do_as_in_eager() -> None:
    a, b, c, d = (spec(name, 40) for name in "abcd")
    assert buckets(joined([cut(a, b), cut(c, d)], a, b, c, d)) == ["d c", "b a"]
    of_whole = joined([whole(a, b), whole(c, d)], a, b, c, d)
    assert (buckets(of_whole), of_whole.segments_of(of_whole.buckets[0])) == (["d c b", "a"], (0, 1))
    assert buckets(joined([whole(a, b), cut(c, d)], a, b, c, d)) == ["d c", "b a"]


def test_a_small_bucket_of_another_dtype_uses_up_no_limit_and_holds_up_nothing() -> None:
    """The first limit is each dtype's own, and a bucket is reduced when its last gradient is ready."""
    config = BucketConfig(cap_bytes=1000, first_bucket_bytes=100)
    a, b, c, d = (spec(name) for name in "abcd")
    last, first = spec("last half", 2, "bfloat16"), spec("first half", 2, "bfloat16")
    plan = joined([whole(first, a, b, c, d, last)], first, a, b, c, d, last, config=config)
    assert buckets(plan) == ["d", "c b a", "last half first half"]


# --------------------------------------------------------------------------- what no graph reads


@pytest.mark.parametrize("make", [cut, whole])
def test_an_unread_parameter_is_ready_just_before_the_one_registered_before_it(make: Any) -> None:
    a, spare, b = spec("a"), spec("spare"), spec("b")
    plan = joined([make(a, b)], a, spare, b)
    assert (buckets(plan), plan.unread) == (["b", "spare", "a"], ("spare",))
    assert buckets(joined([make(a, b)], spare, a, b)) == ["b", "a", "spare"]


def test_small_unread_parameters_share_a_bucket_with_what_is_ready_next_unless_cuts_fixed_it() -> None:
    a, one, two, b = spec("a"), spec("one", 12), spec("two", 12), spec("b")
    plan = joined([whole(a, b)], a, one, two, b)
    assert buckets(plan) == ["b", "two one a"]
    plan = joined([cut(a, b)], a, one, two, b)
    assert buckets(plan) == ["b", "two one", "a"]
    assert plan.buckets[1].segment == 0
    assert plan.buckets[1].reason == UNREAD


@pytest.mark.parametrize("make", [cut, whole])
def test_what_code_before_the_first_graph_that_reads_it_reads_too_is_ready_after_it(make: Any) -> None:
    a, b, head = spec("a"), spec("b"), spec("head")
    plan = joined([make(a, before="head"), make(b, head, before="head a")], head, a, b)
    assert buckets(plan) == ["b", "a", "head"]
    assert plan.unread == ("head",)
    assert "head" not in [name for segment in plan.segments for name in segment.params]


def test_a_model_of_which_no_graph_is_known_is_planned_by_registration() -> None:
    a, b, c = spec("a", 60), spec("b", 60), spec("c", 60)
    plan = joined([], a, b, c)
    assert buckets(plan) == ["c b", "a"]
    assert (plan.unread, plan.segments, plan.cuts) == (("a", "b", "c"), (), ())
    assert joined([]).buckets == ()
