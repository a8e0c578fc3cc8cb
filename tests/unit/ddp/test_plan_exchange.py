"""ddpopt.ddp.plan_exchange: what differs between the ranks' plans, in words."""

import expecttest

from ddpopt.ddp.plan_exchange import plan_difference, same_buckets
from ddpopt.planning.plan import Bucket, Plan


def plan(*buckets: str, device: str = "cpu") -> Plan:
    """A plan of parameters with one-letter names."""
    made = (Bucket(i, tuple(names), 4, "float32", device, 0, "test") for i, names in enumerate(buckets))
    return Plan(tuple(made), (), ())


def test_the_difference_names_ranks_and_parameters_bucket_by_bucket_and_is_cut_short() -> None:
    few = [plan("ab", "cd"), plan("ab", "dc")]
    assert plan_difference(few) == "  bucket 1: rank 0: c, d; rank 1: d, c"
    left = [f"{letter}0" for letter in "abcdefghijkl"]
    plans = [plan(*left), plan(*(name[::-1] for name in left)), plan(*left), plan("abcdefghi")]
    expecttest.assert_expected_inline(
        plan_difference(plans),
        """\
  bucket 0: ranks 0, 2: a, 0; rank 1: 0, a; rank 3: a, b, c, d, e, f, and 3 more
  bucket 1: ranks 0, 2: b, 0; rank 1: 0, b; rank 3: no such bucket
  bucket 2: ranks 0, 2: c, 0; rank 1: 0, c; rank 3: no such bucket
  bucket 3: ranks 0, 2: d, 0; rank 1: 0, d; rank 3: no such bucket
  bucket 4: ranks 0, 2: e, 0; rank 1: 0, e; rank 3: no such bucket
  bucket 5: ranks 0, 2: f, 0; rank 1: 0, f; rank 3: no such bucket
  bucket 6: ranks 0, 2: g, 0; rank 1: 0, g; rank 3: no such bucket
  bucket 7: ranks 0, 2: h, 0; rank 1: 0, h; rank 3: no such bucket
  and 4 more buckets""",
    )


def test_ranks_without_a_plan_are_named() -> None:
    assert plan_difference([None, plan("a"), None]) == "  no plan on ranks 0, 2, one on the others"


def test_plans_are_the_same_where_only_the_device_differs() -> None:
    assert same_buckets([plan("ab", device="cuda:0"), plan("ab", device="cuda:1")])
    assert not same_buckets([plan("ab"), plan("ba")])
    assert not same_buckets([plan("a", "b"), plan("b", "a")])
    assert not same_buckets([plan("ab"), None])
    assert same_buckets([None, None])
