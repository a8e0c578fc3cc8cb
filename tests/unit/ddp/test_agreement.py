"""ddpopt.ddp.agreement: texts of several ranks, here several threads over one store; how plans differ."""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import expecttest
import pytest
import torch.distributed as dist

from ddpopt.ddp.agreement import agree, announce, plan_difference, same_buckets
from ddpopt.errors import InfrastructureError
from ddpopt.planning.plan import Bucket, Plan
from tests.support.refusals import refusal

c10d: Any = dist  # torch does not mark its re-exports
Members = Callable[[int], list[Any]]


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Members:
    """Makes so many stand-ins for a process group, with as much of it as agreement looks at."""
    monkeypatch.setattr(c10d.distributed_c10d, "_get_process_group_store", lambda member: member.store)
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")

    def make(count: int) -> list[Any]:
        known = {"size": lambda: count, "store": c10d.HashStore()}
        return [SimpleNamespace(rank=lambda rank=rank: rank, **known) for rank in range(count)]

    return make


def outcomes(actions: Sequence[Callable[[], object]]) -> list[object]:
    """What each action returned or raised, run at the same time."""

    def outcome(action: Callable[[], object]) -> object:
        try:
            return action()
        except InfrastructureError as error:
            return str(error)

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(outcome, actions))


def calls(members: Sequence[Any], payloads: Sequence[str], seconds: float = 10) -> list[Callable[[], object]]:
    timeout = timedelta(seconds=seconds)
    pairs = zip(members, payloads, strict=True)
    return [functools.partial(agree, member, "test", payload, timeout) for member, payload in pairs]


def test_every_rank_learns_every_text_in_rank_order_and_calls_in_a_row_do_not_mix(members: Members) -> None:
    group = members(3)

    def several(member: Any) -> list[tuple[str, ...]]:
        # Ranks run at different speeds; a fast one is never a call ahead of what a slow one still reads.
        texts = []
        for number in range(20):
            time.sleep(0.001 * ((member.rank() + number) % 3))
            texts.append(agree(member, "test", f"{number} of {member.rank()}"))
        return texts

    expected = [tuple(f"{number} of {rank}" for rank in range(3)) for number in range(20)]
    assert outcomes([functools.partial(several, member) for member in group]) == [expected] * 3


def test_calls_about_different_things_do_not_mix(members: Members) -> None:
    first, second = members(2)

    def both(member: Any, order: Sequence[str]) -> dict[str, tuple[str, ...]]:
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(order, pool.map(lambda what: agree(member, what, what), order), strict=True))

    expected = {"x": ("x", "x"), "y": ("y", "y")}
    assert outcomes([lambda: both(first, "xy"), lambda: both(second, "yx")]) == [expected, expected]


def test_what_no_rank_reads_any_more_is_deleted(members: Members) -> None:
    group = members(2)
    for number in range(3):
        outcomes(calls(group, [f"{number}"] * 2))
    before = group[0].store.num_keys()
    for number in range(10):
        outcomes(calls(group, [f"{number}"] * 2))
    assert group[0].store.num_keys() == before


def test_a_late_rank_raises_too_and_the_next_call_works(members: Members) -> None:
    early, late = members(2)
    first = outcomes(calls([early], "a", 0.1))
    second = outcomes(calls([late], "a", 0.1))
    assert isinstance(first[0], str)
    assert second == [
        "test: rank 1 answered after another rank had given up waiting. Make this call on all ranks at "
        "about the same time, or allow more time with timeout="
    ]
    assert outcomes(calls([early, late], "bc")) == [("b", "c")] * 2


@pytest.mark.parametrize("delay_s", [0.0, 0.0995, 0.1, 0.1005])
def test_either_all_ranks_agree_or_all_raise(members: Members, delay_s: float) -> None:
    """The last rank comes just when the others give up."""
    for _ in range(5):
        first, second, last = members(3)
        punctual = calls([first, second], "aa", 0.1)
        (late,) = calls([last], "a", 0.1)

        def arrive(late: Callable[[], object] = late) -> object:
            time.sleep(delay_s)
            return late()

        kinds = {type(outcome) for outcome in outcomes([*punctual, arrive])}
        assert len(kinds) == 1


def test_who_announces_a_failure_does_not_wait_and_is_heard(members: Members) -> None:
    first, second = members(2)
    announce(first, "test", "failed")
    assert agree(second, "test", "fine") == ("failed", "fine")


def test_a_store_that_is_gone_is_an_error(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(member: object) -> None:
        raise dist.DistNetworkError("connection reset")

    (member, _) = members(2)
    monkeypatch.setattr(c10d.distributed_c10d, "_get_process_group_store", gone)
    assert refusal(lambda: agree(member, "test", "a"), InfrastructureError) == (
        "test: the process group's key-value store failed (connection reset). Usually this means that rank "
        "0, which hosts it, has exited: check its log for the reason"
    )


def plan(*buckets: str, device: str = "cpu") -> Plan:
    """A plan of parameters with one-letter names."""
    found = (Bucket(i, tuple(b), 4, "float32", device, 0, "test") for i, b in enumerate(buckets))
    return Plan(tuple(found), (), ())


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
