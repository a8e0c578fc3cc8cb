"""ddpopt.judge.trials.attempts: ranks that fail start again, in one limit, and each trial gets a status.

The ranks are played by functions that emit what ranks would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ddpopt.judge.rules.outcome import JUDGE_FAILED
from ddpopt.judge.trials import attempts
from ddpopt.judge.trials.attempts import Attempts
from ddpopt.judge.trials.on_rank import Ended, Request, Settings, Started
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.failures import RankFailure, RanksFailed

Emit = Callable[[object], None]
Play = Callable[[Emit, "Stage"], None]
Attempt = Callable[..., tuple["Stage", tuple[Trial, ...]]]
REQUESTS = [Request(case, "join", ("torch", "whole") if case == "b" else ("torch",)) for case in "abcd"]
CASES = ("a", "b", "b", "c", "d")
MODES = ("torch", "torch", "whole", "torch", "torch")


class Stage:
    """Where launches are played, one after the other; also a clock that moves only when it is told to."""

    def __init__(self, plays: Sequence[Play]) -> None:
        self.now = 100.0
        self.limits: list[float] = []
        self.done: list[tuple[int, ...]] = []
        self._plays = iter(plays)

    def launch(self, *task: Any, limit_s: float, on_event: Emit, **_: Any) -> None:
        self.limits.append(limit_s)
        self.done.append(task[-1])
        next(self._plays)(on_event, self)

    def monotonic(self) -> float:
        return self.now


THREADS = """\
Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 331 in wait
Current thread 0x02 (most recent call first):
  File "/lib/reduce.py", line 7 in send
"""
KILLED = RanksFailed([RankFailure(1, "died", "a trial", -9, "SIGKILL")], 2)
CRASHED = RanksFailed([RankFailure(0, "died", "a trial", -11, "SIGSEGV", stack=THREADS)], 2)
RAISED = RanksFailed([RankFailure(1, "raised", "a trial", 1, stack="ValueError: no")], 2)
SLOW = '  File "/home/me/slow.py", line 3 in f'
STALLED = RanksFailed([RankFailure(1, "stalled", "a trial", 1, stack=SLOW)], 2)


def judges(*indices: int) -> Play:
    def play(emit: Emit, _: Stage) -> None:
        for index in indices:
            emit(Started(index, CASES[index], "join", MODES[index]))
            emit(Ended(index, Trial(CASES[index], MODES[index], "join", "eager", Status.OK)))

    return play


def fails(failure: RanksFailed, index: int, *judged: int, mode: str = "", after_s: float = 10) -> Play:
    def play(emit: Emit, stage: Stage) -> None:
        judges(*judged)(emit, stage)
        emit(Started(index, f"case {CASES[index]}", "join", mode))
        stage.now += after_s
        raise failure

    return play


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Attempt:
    def run(*plays: Play, limit_s: float = 3600) -> tuple[Stage, tuple[Trial, ...]]:
        stage = Stage(plays)
        monkeypatch.setattr(attempts, "launch", stage.launch)
        monkeypatch.setattr(attempts, "time", stage)
        return stage, Attempts(REQUESTS, Settings("eager"), lambda _: None).run(2, limit_s, None)

    return run


OK, BROKEN = Status.OK, Status.BROKEN


@pytest.mark.parametrize(
    ("plays", "limit_s", "expected"),
    [
        pytest.param(
            (fails(KILLED, 0), fails(KILLED, 3, 1, 2), judges(4)),
            30,
            ([BROKEN, OK, OK, BROKEN, OK], [30, 20, 10], [(), (0,), (0, 1, 2, 3)]),
            id="one limit counts for all starts",
        ),
        pytest.param(
            (fails(KILLED, 0),),
            10,
            ([BROKEN] * 5, [10], [()]),
            id="a rank that dies as the limit passes is still what broke its trial",
        ),
    ],
)
def test_ranks_that_fail_are_started_again_within_one_limit(
    plays: tuple[Play, ...], limit_s: float, expected: tuple[object, ...], attempt: Attempt
) -> None:
    stage, trials = attempt(*plays, limit_s=limit_s)
    assert ([trial.status for trial in trials], stage.limits, stage.done) == expected


EAGER_FAILS = "eager DDP itself did not end here, on case b: {}"
AGAIN = "not tried again: it crashed the ranks on case b"


@pytest.mark.parametrize(
    ("failure", "mode", "lost"),
    [
        (KILLED, "", dict.fromkeys((1, 2), (BROKEN, EAGER_FAILS.format(KILLED)))),
        (STALLED, "", dict.fromkeys((1, 2), (BROKEN, EAGER_FAILS.format(STALLED)))),
        (CRASHED, "torch", {1: (BROKEN, str(CRASHED)), 3: (BROKEN, AGAIN), 4: (BROKEN, AGAIN)}),
        (RAISED, "torch", {1: (BROKEN, f"{JUDGE_FAILED}: {RAISED}")}),
        (RAISED, "", dict.fromkeys((1, 2), (BROKEN, f"{JUDGE_FAILED}: {RAISED}"))),
    ],
    ids=["eager dies", "eager stalls", "a mode dies", "the judge raises", "the judge raises under eager"],
)
def test_a_failure_takes_its_trial_and_what_would_fail_as_well(
    failure: RanksFailed, mode: str, lost: dict[int, tuple[Status, str]], attempt: Attempt
) -> None:
    others = [index for index in range(1, 5) if index not in lost]
    _, trials = attempt(fails(failure, 1, 0, mode=mode), judges(*others))
    told = {index: (trial.status, trial.reason) for index, trial in enumerate(trials)}
    assert told == dict.fromkeys((0, *others), (OK, "")) | lost
    assert trials[1].case == "case b"


def test_what_a_run_had_no_time_for_is_broken_and_says_so(attempt: Attempt) -> None:
    _, trials = attempt(fails(STALLED, 1, 0, mode="torch", after_s=90), limit_s=90)
    assert trials[1].reason == str(STALLED)
    passed = "not tried: the time limit of the whole run, 90 s, had passed. Raise it, or ask for less."
    assert trials[2].reason == passed


@pytest.mark.parametrize("before", [(), (fails(KILLED, 0),)])
def test_a_failure_before_all_is_nobodys(before: tuple[Play, ...], attempt: Attempt) -> None:
    def dies(*_: object) -> None:
        raise KILLED

    with pytest.raises(RanksFailed, match="died of SIGKILL"):
        attempt(*before, dies)
