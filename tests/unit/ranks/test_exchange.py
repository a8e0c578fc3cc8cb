"""ddpopt.ranks.exchange: values reach every rank, nobody waits for good, no key is left."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ddpopt.ranks.exchange import PIECE_BYTES, Exchange, PeersMissing

C10D: Any = dist  # torch does not mark its re-exports
SIZE = 3
AMPLE_S = 30.0


@pytest.fixture
def store() -> Any:
    return C10D.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=AMPLE_S))


def on_ranks(task: Callable[[Exchange, int], Any], store: Any, limit_s: float = AMPLE_S) -> list[Any]:
    """What a task returned on each of some ranks, which are threads with connections of their own."""

    def rank(number: int) -> Any:
        own = C10D.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=AMPLE_S))
        return task(Exchange(own, number, SIZE, limit_s), number)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(rank, range(SIZE)))


def test_every_rank_gets_every_value_of_its_own_round_and_no_key_is_left(store: Any) -> None:
    def task(exchange: Exchange, rank: int) -> list[list[bytes]]:
        return [exchange.gather(f"{rank} in round {number}".encode()) for number in range(20)]

    on_ranks(lambda exchange, rank: None, store)
    before = store.num_keys()
    expected = [[f"{rank} in round {number}".encode() for rank in range(SIZE)] for number in range(20)]
    assert on_ranks(task, store) == [expected] * SIZE
    assert store.num_keys() == before


def test_values_may_be_empty_and_larger_than_a_store_takes_at_once(store: Any) -> None:
    values = [b"", b"x" * (PIECE_BYTES + 1), b"y" * PIECE_BYTES]
    assert on_ranks(lambda exchange, rank: exchange.gather(values[rank]), store) == [values] * SIZE


def test_one_exchange_after_the_other_in_one_store_do_not_meet(store: Any) -> None:
    def task(exchange: Exchange, rank: int) -> list[bytes]:
        time.sleep(0.05 * rank)  # the first rank is in the second exchange while the last reads the first
        return exchange.gather(f"{id(store)} {rank} {threading.get_native_id()}".encode())

    first, second = on_ranks(task, store), on_ranks(task, store)
    assert first[0] == first[1] == first[2] != second[0]


def test_a_rank_that_left_is_not_waited_for() -> None:
    store = C10D.HashStore()
    stayed, left = (Exchange(store, rank, 2, AMPLE_S) for rank in range(2))
    left.leave()
    began = time.monotonic()
    with pytest.raises(PeersMissing, match="got none from 1: rank 1 left"):
        stayed.gather(b"")
    assert time.monotonic() - began < 5


def test_what_a_rank_gave_before_it_left_still_counts() -> None:
    store = C10D.HashStore()
    stayed, left = (Exchange(store, rank, 2, 0.01) for rank in range(2))
    with pytest.raises(PeersMissing):
        left.gather(b"last")
    left.leave()
    assert stayed.gather(b"own") == [b"own", b"last"]


def test_a_missing_rank_is_named_after_the_limit() -> None:
    exchange = Exchange(C10D.HashStore(), 1, 3, 0.05)
    with pytest.raises(PeersMissing, match=r"got none from 0, 2: no value arrived within 0\.05 s"):
        exchange.gather(b"")
