"""The plans of a model's graphs, joined: every parameter in one bucket, also those that no graph reads."""

import pytest

from ddpopt.planning.bucket_rule import BucketConfig, ParamSpec
from ddpopt.planning.facts import GraphFacts, ParamUse
from ddpopt.planning.join import join_plans
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph

CAP_100 = BucketConfig(cap_bytes=100, first_bucket_bytes=100)


def spec(name: str, nbytes: int = 100, dtype: str = "float32", sparse: bool = False) -> ParamSpec:
    return ParamSpec(name, nbytes, dtype, "cpu", sparse)


def graph(index: int, *specs: ParamSpec) -> Plan:
    """The plan of a graph with one node for each parameter, in forward order."""
    return plan_graph(facts(index, *specs), CAP_100, index)


def facts(index: int, *specs: ParamSpec) -> GraphFacts:
    names = tuple(f"g{index}_{spec.name}" for spec in specs)
    uses = tuple(ParamUse(spec, (position,)) for position, spec in enumerate(specs))
    return GraphFacts(names, uses, (None,) * len(names))


def buckets(plan: Plan) -> list[str]:
    return [" ".join(bucket.params) for bucket in plan.buckets]


def joined(plans: list[Plan], *specs: ParamSpec) -> Plan:
    plan = join_plans(plans, specs, CAP_100)
    assert sorted(name for b in plan.buckets for name in b.params) == sorted(spec.name for spec in specs)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert [segment.index for segment in plan.segments] == list(range(len(plan.segments)))
    sizes = {spec.name: spec.nbytes for spec in specs}
    assert [b.nbytes for b in plan.buckets] == [sum(sizes[name] for name in b.params) for b in plan.buckets]
    return plan


# ----------------------------------------------------------------------------------- several graphs


def test_the_plan_of_a_single_graph_that_reads_everything_stays_as_it_is() -> None:
    specs = (spec("a"), spec("b"))
    plan = graph(0, *specs)
    assert joined([plan], *specs) == plan


def test_the_buckets_of_the_last_graph_are_reduced_first() -> None:
    a, b, c, d = (spec(name) for name in "abcd")
    plan = joined([graph(0, a, b), graph(1, c, d)], a, b, c, d)
    assert buckets(plan) == ["d", "c", "b", "a"]


def test_segments_count_through_all_graphs_and_keep_their_graph() -> None:
    a, b, c, d = (spec(name) for name in "abcd")
    plan = joined([graph(0, a, b), graph(1, c, d)], a, b, c, d)
    assert [(segment.index, segment.graph) for segment in plan.segments] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [bucket.segment for bucket in plan.buckets] == [3, 2, 1, 0]
    assert [segment.buckets for segment in plan.segments] == [(3,), (2,), (1,), (0,)]
    assert [(cut.graph, cut.before) for cut in plan.cuts] == [(0, "g0_b"), (1, "g1_d")]


def test_graphs_are_numbered_in_forward_order_whatever_they_were_before() -> None:
    a, b, c, d = (spec(name) for name in "abcd")
    plan = joined([graph(0, a, b), graph(0, c, d)], a, b, c, d)
    assert [segment.graph for segment in plan.segments] == [0, 0, 1, 1]
    assert [cut.graph for cut in plan.cuts] == [0, 1]


def test_a_bucket_never_holds_parameters_of_two_graphs() -> None:
    a, b, c, d = (spec(name, 10) for name in "abcd")
    plan = joined([graph(0, a, b), graph(1, c, d)], a, b, c, d)
    assert buckets(plan) == ["d c", "b a"]
    assert plan.spread == 0


def test_a_bucket_ends_with_its_graph_and_where_eager_ends_one_so_a_larger_cap_may_make_one_more() -> None:
    a, b, later = spec("a", 6), spec("b", 4), spec("later", 12)
    found = []
    for cap in (12, 13):
        config = BucketConfig(cap_bytes=cap, first_bucket_bytes=cap)
        first = plan_graph(facts(0, a, b), config, 0, ahead=[later])
        second = plan_graph(facts(1, later), config, 1)
        found.append(buckets(join_plans([first, second], (a, b, later), config)))
    # at 13 eager DDP sends "later b" together, then "a": b must not wait for a, nor "later" for b
    assert found == [["later", "b a"], ["later", "b", "a"]]


def test_a_graph_without_parameters_keeps_its_segment() -> None:
    a, b = spec("a"), spec("b")
    plan = joined([graph(0, a), graph(1), graph(2, b)], a, b)
    assert [segment.graph for segment in plan.segments] == [0, 1, 2]
    assert [bucket.segment for bucket in plan.buckets] == [2, 0]


# --------------------------------------------------------------------------- what no graph reads


def test_an_unread_parameter_is_kept_visible() -> None:
    a, spare, b = spec("a"), spec("spare"), spec("b")
    plan = joined([graph(0, a, b)], a, spare, b)
    assert plan.unread == ("spare",)


def test_an_unread_parameter_is_ready_just_before_the_one_registered_in_front_of_it() -> None:
    a, spare, b = spec("a"), spec("spare"), spec("b")
    assert buckets(joined([graph(0, a, b)], a, spare, b)) == ["b", "spare", "a"]


def test_an_unread_parameter_registered_first_is_ready_last() -> None:
    spare, a, b = spec("spare"), spec("a"), spec("b")
    assert buckets(joined([graph(0, a, b)], spare, a, b)) == ["b", "a", "spare"]


def test_small_unread_parameters_share_the_bucket_in_front_of_which_they_belong() -> None:
    a, one, two, b = spec("a"), spec("one", 10), spec("two", 10), spec("b")
    plan = joined([graph(0, a, b)], a, one, two, b)
    assert buckets(plan) == ["b", "two one a"]
    assert plan.buckets[1].segment == 0


def test_unread_parameters_that_fill_a_bucket_have_one_of_their_own() -> None:
    a, one, two = spec("a"), spec("one", 60), spec("two", 60)
    plan = joined([graph(0, a)], a, one, two)
    assert buckets(plan) == ["two one", "a"]
    assert plan.buckets[0].reason == (
        "no compiled graph reads these parameters; they are placed by their order of registration"
    )


def test_an_unread_parameter_of_another_dtype_does_not_mix() -> None:
    a, half, b = spec("a"), spec("half", 10, "bfloat16"), spec("b")
    plan = joined([graph(0, a, b)], a, half, b)
    assert sorted(buckets(plan)) == ["a", "b", "half"]
    assert [bucket.dtype for bucket in plan.buckets if bucket.params == ("half",)] == ["bfloat16"]


def test_an_unread_sparse_parameter_travels_alone() -> None:
    a, table, b = spec("a", 10), spec("table", 10, sparse=True), spec("b", 10)
    assert buckets(joined([graph(0, a, b)], a, table, b)) == ["table", "b a"]


def test_an_unread_parameter_does_not_join_a_sparse_one() -> None:
    table, small = spec("table", 50, sparse=True), spec("small", 10)
    assert sorted(buckets(joined([graph(0, table)], table, small))) == ["small", "table"]


def test_what_code_in_front_of_a_graph_reads_is_ready_behind_it() -> None:
    a, b, norm = spec("a"), spec("b"), spec("norm")
    plans = [graph(0, a), graph(1, b)]
    for names, order in ((("norm", ""), "b a norm"), (("", "norm"), "b norm a"), (("", ""), "norm b a")):
        plan = join_plans(plans, (a, b, norm), CAP_100, [{name} for name in names])
        assert " ".join(buckets(plan)) == order
        assert plan.unread == ("norm",)


def test_what_is_read_in_front_of_two_graphs_waits_for_the_first() -> None:
    a, b, norm = spec("a"), spec("b"), spec("norm")
    plan = join_plans([graph(0, a), graph(1, b)], (a, b, norm), CAP_100, [{"norm"}, {"norm"}])
    assert buckets(plan) == ["b", "a", "norm"]


def test_what_code_in_front_of_the_first_graph_that_reads_it_reads_too_is_ready_behind_it() -> None:
    a, b, head = spec("a"), spec("b"), spec("head")
    plan = join_plans([graph(0, a), graph(1, b, head)], (head, a, b), CAP_100, [{"head"}, {"head", "a"}])
    assert buckets(plan) == ["b", "a", "head"]
    assert plan.unread == ("head",)
    assert (plan.spread, plan.segments[2].params) == (0, ())


def test_what_an_earlier_graph_reads_completes_there_whatever_else_reads_it() -> None:
    a, b = spec("a"), spec("b")
    plans = [graph(0, a), graph(1, b)]
    assert join_plans(plans, (a, b), CAP_100, [set(), {"a"}]) == join_plans(plans, (a, b), CAP_100)


def test_a_bucket_that_loses_a_parameter_is_full_no_longer() -> None:
    a, b, c = spec("a", 60), spec("b", 50), spec("c", 30)
    plan = join_plans([graph(0, a, c, b)], (a, b, c), CAP_100, [{"b"}])
    assert buckets(join_plans([graph(0, a, c, b)], (a, b, c), CAP_100)) == ["b c a"]
    assert buckets(plan) == ["c a b"]


def test_what_lies_between_fills_the_bucket_of_the_graph_in_front() -> None:
    a, b, one, two = spec("a"), spec("b"), spec("one", 10), spec("two", 10)
    plan = join_plans([graph(0, a), graph(1, b)], (one, a, b, two), CAP_100, [set(), {"one", "two"}])
    assert buckets(plan) == ["b", "two one a"]
    assert [bucket.segment for bucket in plan.buckets] == [1, 0]


def test_a_model_of_which_no_graph_is_known_is_planned_by_registration() -> None:
    a, b, c = spec("a", 60), spec("b", 60), spec("c", 60)
    plan = joined([], a, b, c)
    assert buckets(plan) == ["c b", "a"]
    assert (plan.unread, plan.segments, plan.cuts) == (("a", "b", "c"), (), ())


def test_a_model_without_parameters_has_no_bucket() -> None:
    assert joined([]).buckets == ()


@pytest.mark.parametrize("policy", ["plan", "ddp"])
def test_the_policy_is_that_of_the_graphs(policy: str) -> None:
    a = spec("a")
    made = graph(0, a)
    assert join_plans([Plan(**{**vars(made), "policy": policy})], [a], CAP_100).policy == policy
