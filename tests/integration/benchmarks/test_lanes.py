"""Tests of `benchmarks.lanes`. Jobs live at module level, because other processes import them."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.lanes import Lane, Lost


def who(rank: int, world_size: int, rendezvous: str) -> tuple[int, int, str]:
    return rank, world_size, rendezvous


def process_id(*_: object) -> int:
    return os.getpid()


def die_on_rank_1(rank: int, *_: object) -> str:
    if rank == 1:
        os.write(2, b"native abort\n")
        os._exit(7)
    return "alive"


def fail(*_: object) -> None:
    raise ValueError("no such thing")


def hang(*_: object) -> None:
    time.sleep(60)


@pytest.fixture
def lane() -> Iterator[Lane]:
    opened = Lane(world_size=2, limit_s=30.0)
    yield opened
    opened.close()


def test_every_rank_answers_and_each_job_has_its_own_rendezvous(lane: Lane) -> None:
    first, second = lane.run(who), lane.run(who)
    assert [answer[:2] for answer in first] == [(0, 2), (1, 2)]
    assert first[0][2] == first[1][2] != second[0][2]
    assert not Path(first[0][2]).exists()


def test_processes_stay_up_between_jobs(lane: Lane) -> None:
    assert lane.run(process_id) == lane.run(process_id)


def test_a_rank_that_dies_is_lost_with_its_last_words_and_the_next_job_runs(lane: Lane) -> None:
    assert lane.run(die_on_rank_1) == ["alive", Lost("process died with exit code 7", "native abort")]
    assert len(lane.run(process_id)) == 2


def test_a_job_that_raises_is_lost_with_its_traceback(lane: Lane) -> None:
    answer = lane.run(fail)[0]
    assert answer.reason == "ValueError: no such thing"
    assert "in fail" in answer.detail


def test_a_job_that_hangs_is_ended_at_its_limit_and_shows_where_it_stands() -> None:
    with closing(Lane(world_size=1, limit_s=8.0)) as lane:
        lane.run(process_id)  # from now on the process has all that it imports
        started = time.monotonic()
        answer = lane.run(hang)[0]
        assert time.monotonic() - started < 50
    assert answer.reason == "no answer within the limit"
    assert "in hang" in answer.detail
