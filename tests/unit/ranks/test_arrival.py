"""ddpopt.ranks.arrival: every rank learns that one cannot start, and who tells people of it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.errors import DdpoptError, UsageError
from ddpopt.ranks import arrival
from ddpopt.ranks.arrival import (
    Arrival,
    CannotStart,
    Meeting,
    address_towards,
    announced_by_gloo,
    unreachable,
)
from ddpopt.ranks.exchange import PeersMissing

C10D: Any = dist  # torch does not mark its re-exports
SIZE = 3
AMPLE_S = 30.0
HERE, THERE, LOOPBACK = "192.0.2.1", "192.0.2.2", "127.0.1.1"
MISSING, OTHER = "no file l.json", "no module shop"


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Meeting, int], Any]], list[Any]]:
    """Runs a task on each of some ranks, which are threads of their own; returns what it returned."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    limit = timedelta(seconds=AMPLE_S)
    store = C10D.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)
    others = [C10D.TCPStore("127.0.0.1", store.port, timeout=limit) for _ in range(SIZE - 1)]

    def run(task: Callable[[Meeting, int], Any]) -> list[Any]:
        def rank(number: int) -> Any:
            return task(Meeting([store, *others][number], number, SIZE), number)

        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(rank, range(SIZE)))

    return run


def arrived(meeting: Meeting, problem: str) -> str:
    """What a rank says to people after it arrived with a problem, or with none; empty if nothing."""
    said = problem
    if not problem:
        try:
            meeting.arrive(AMPLE_S, uses_gloo=True)
        except DdpoptError as error:
            said = str(error)
    return said if said and meeting.fail(said) else ""


def test_each_problem_is_told_once_on_a_machine_and_every_rank_knows_of_the_first(on_ranks: Any) -> None:
    for problems in product(["", MISSING, OTHER], repeat=SIZE):
        said = on_ranks(lambda meeting, rank, problems=problems: arrived(meeting, problems[rank]))
        first = next((rank for rank, problem in enumerate(problems) if problem), None)
        seen: set[str] = set()
        for problem, text in zip(problems, said, strict=True):
            expected = problem or ("" if first is None else f"rank {first} cannot start: {problems[first]}")
            assert text == ("" if problem in seen else expected)
            seen.add(problem)


def test_a_rank_that_fails_later_tells_people_itself(on_ranks: Any) -> None:
    def task(meeting: Meeting, rank: int) -> bool:
        meeting.arrive(AMPLE_S, uses_gloo=False)
        meeting.arrive(0.0, uses_gloo=False)  # a second time does not wait
        return rank != 2 or meeting.fail(MISSING)

    assert on_ranks(task) == [True] * SIZE


def test_a_problem_is_told_where_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Meeting:
        raise dist.DistNetworkError("the store is gone")

    monkeypatch.setattr(arrival, "meeting", lost)
    assert arrival.tells(MISSING)


def test_values_are_gathered_after_the_arrival(on_ranks: Any) -> None:
    def task(meeting: Meeting, rank: int) -> list[int]:
        meeting.arrive(AMPLE_S, uses_gloo=False)
        return meeting.gather(rank * rank, AMPLE_S)

    assert on_ranks(task) == [[0, 1, 4]] * SIZE


def test_a_rank_that_never_comes_is_named(on_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "FAILED_WAITS_S", 0.1)

    def task(meeting: Meeting, rank: int) -> str:
        if rank == 0:
            return str(meeting.fail(MISSING))
        if rank == 1:
            with pytest.raises(PeersMissing, match="got none from 2: no value arrived within"):
                meeting.arrive(0.1, uses_gloo=False)
        return ""

    assert on_ranks(task) == ["True", "", ""]


def test_one_that_comes_after_a_failed_one_has_gone_learns_why(on_ranks: Any) -> None:
    def task(meeting: Meeting, rank: int) -> str:
        if rank == 0:
            meeting.fail(MISSING)
            return ""
        with pytest.raises(CannotStart, match=f"rank 0 cannot start: {MISSING}"):
            meeting.arrive(AMPLE_S, uses_gloo=False)
        return ""

    on_ranks(task)


@pytest.mark.parametrize(
    ("addresses", "announced", "hidden"),
    [
        ((HERE, HERE), (LOOPBACK, LOOPBACK), ""),  # two nodes of torchrun on one machine
        ((HERE, THERE), (HERE, THERE), ""),
        ((HERE, THERE), ("", ""), ""),  # an interface is named, or NCCL is used
        ((HERE, THERE), (HERE, LOOPBACK), "rank 1 would tell them 127.0.1.1"),
        ((HERE, HERE, THERE, THERE), ("::1", "::1", THERE, THERE), "ranks 0, 1 would tell them ::1"),
    ],
)
def test_who_tells_other_machines_a_loopback_address_is_named(
    addresses: tuple[str, ...], announced: tuple[str, ...], hidden: str
) -> None:
    arrivals = [Arrival("", *pair) for pair in zip(addresses, announced, strict=True)]
    said = unreachable(arrivals)
    assert hidden in said
    assert bool(said) == bool(hidden)
    assert "set GLOO_SOCKET_IFNAME" in said or not hidden


def test_gloos_address_is_loopback_where_the_host_has_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    assert announced_by_gloo() == "127.0.0.1"
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert announced_by_gloo() in ("127.0.0.1", "::1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert announced_by_gloo() == ""


def test_the_address_on_the_way_to_a_host_is_this_machines() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") == ""


def test_a_problem_of_addresses_is_a_usage_error(on_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = iter(["192.0.2.1", "192.0.2.2", "192.0.2.3"])
    monkeypatch.setattr(arrival, "address_towards", lambda _: next(addresses))
    monkeypatch.setattr(arrival, "announced_by_gloo", lambda: LOOPBACK)

    def task(meeting: Meeting, rank: int) -> None:
        with pytest.raises(UsageError, match="ranks 0, 1, 2 would tell them"):
            meeting.arrive(AMPLE_S, uses_gloo=True)

    on_ranks(task)
