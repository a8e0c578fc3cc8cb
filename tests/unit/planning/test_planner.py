"""Buckets and cuts from facts that are written by hand: DDP's rule, and where it meets the graph."""

from collections.abc import Mapping, Sequence

import pytest

from ddpopt.planning.bucket_rule import ParamSpec, rebuilt_buckets
from ddpopt.planning.facts import GraphFacts, ParamUse
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.planning.planner import plan_graph

CAP_100 = BucketConfig(cap_bytes=100, first_bucket_bytes=100)


def use(name: str, nbytes: int, *readers: int, dtype: str = "float32", sparse: bool = False) -> ParamUse:
    return ParamUse(ParamSpec(name, nbytes, dtype, "cpu", sparse), readers)


def facts(nodes: int, uses: Sequence[ParamUse], blocked: Mapping[int, str] | None = None) -> GraphFacts:
    """Body nodes n0, n1, …; `blocked` says why a cut before a position is not possible."""
    why = blocked or {}
    names = tuple(f"n{position}" for position in range(nodes))
    return GraphFacts(names, tuple(uses), tuple(why.get(position) for position in range(nodes)))


def chain(*sizes: int) -> GraphFacts:
    """One node for each parameter p0, p1, …, in forward order."""
    return facts(len(sizes), [use(f"p{i}", nbytes, i) for i, nbytes in enumerate(sizes)])


def buckets(plan: Plan) -> list[str]:
    return [" ".join(bucket.params) for bucket in plan.buckets]


def cuts(plan: Plan) -> list[str]:
    return [cut.before for cut in plan.cuts]


BEFORE = use("before", 100, 0)
HALF = use("half", 10, 2, dtype="bfloat16")
STREAM = {2: "a stream", 3: "a stream"}
PLANNED: dict[str, tuple[GraphFacts, list[str], list[str]]] = {
    "gradients of one node go smaller first": (
        facts(2, [use("weight", 100, 1), use("bias", 4, 1), BEFORE]), ["bias weight", "before"], ["n1"]
    ),
    "what is left of a node joins the bucket that closed at it": (
        facts(2, [use("a", 70, 1), use("b", 70, 1), use("c", 80, 1), BEFORE]), ["a b c", "before"], ["n1"]
    ),
    "one node may fill several buckets": (
        facts(2, [use("a", 100, 1), use("b", 101, 1), use("c", 102, 1), BEFORE]),
        ["a", "b", "c", "before"], ["n1"],
    ),
    "a cut leaves no bucket of another dtype open across it": (
        facts(3, [HALF, use("first half", 10, 0, dtype="bfloat16"), use("full", 100, 1), BEFORE]),
        ["full", "half", "first half", "before"], ["n1"],
    ),
    "the last gradient of a dtype does not wait for the end of backward": (
        facts(3, [HALF, use("full", 100, 1), BEFORE]), ["half", "full", "before"], ["n1", "n2"]
    ),
    "within nodes that cannot be parted the latest reader still goes first": (
        facts(4, [use("early", 10, 1), use("late", 90, 3), BEFORE], STREAM),
        ["late early", "before"], ["n1"],
    ),
    "a graph that cannot be cut is one segment": (
        facts(4, chain(*[100] * 4).params, dict.fromkeys(range(4), "a transform")),
        ["p3", "p2", "p1", "p0"], [],
    ),
    "a graph that reads no parameter has no bucket": (facts(3, []), [], []),
    "an empty graph has an empty segment": (facts(0, []), [], []),
}  # fmt: skip


@pytest.mark.parametrize("claim", PLANNED)
def test_a_graph_has_these_buckets_and_cuts(claim: str) -> None:
    given, of_plan, before = PLANNED[claim]
    plan = plan_graph(given, CAP_100)
    assert (buckets(plan), cuts(plan), len(plan.segments)) == (of_plan, before, len(before) + 1)


def test_a_bucket_closed_for_a_cut_of_another_dtype_uses_up_its_limit() -> None:
    config = BucketConfig(cap_bytes=100, first_bucket_bytes=20)
    uses = [use("half", 10, 3, dtype="bfloat16"), use("full", 20, 2)]
    uses += [use("half_2", 20, 1, dtype="bfloat16"), use("half_3", 20, 0, dtype="bfloat16")]
    plan = plan_graph(facts(4, uses), config)
    assert (buckets(plan), cuts(plan)) == (["full", "half", "half_2 half_3"], ["n2"])


# ------------------------------------------------------------------------------------- DDP's own buckets


EQUAL_LAYERS = chain(3, *((60, 15, 20) * 8), 7, 8)


@pytest.mark.parametrize("given", [chain(50, 60, 30, 60, 20), chain(40, 60, 59, 40), EQUAL_LAYERS])
def test_where_each_node_can_be_cut_our_buckets_are_ddps(given: GraphFacts) -> None:
    ready = [use.spec for use in reversed(given.params)]
    by_ddp = [" ".join(ready[i].name for i in bucket) for bucket in rebuilt_buckets(ready, CAP_100)]
    assert buckets(plan_graph(given, CAP_100)) == by_ddp
