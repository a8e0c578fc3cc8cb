"""ddpopt.judge.attempts: ranks that fail are started anew, within one limit, and no trial is lost.

The ranks are played by functions that emit what ranks would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ddpopt.errors import InfrastructureError
from ddpopt.judge import attempts
from ddpopt.judge.attempts import Attempts
from ddpopt.judge.trials import Asked, Ended, Settings, Started
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.failures import RankFailure, RanksFailed

Emit = Callable[[object], None]
Play = Callable[[Emit, "Clock"], None]
ASKED = [
    Asked("a", "join", ("torch",)),
    Asked("b", "join", ("torch", "whole")),
    Asked("c", "join", ("torch",)),
    Asked("d", "join", ("torch",)),
]
CASES = ("a", "b", "b", "c", "d")
MODES = ("torch", "torch", "whole", "torch", "torch")


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Stage:
    """Where launches are played, one after the other."""

    def __init__(self, plays: Sequence[Play]) -> None:
        self.clock = Clock()
        self.limits: list[float] = []
        self.done: list[tuple[int, ...]] = []
        self._plays = iter(plays)

    def launch(self, *task: Any, limit_s: float, on_event: Emit, **_: Any) -> None:
        self.limits.append(limit_s)
        self.done.append(task[-1])
        next(self._plays)(on_event, self.clock)


def failed(kind: Any = "died", signal: str = "SIGKILL") -> RanksFailed:
    return RanksFailed([RankFailure(1, kind, "a trial", -9, signal)], 2)


def judges(*indices: int) -> Play:
    def play(emit: Emit, clock: Clock) -> None:
        for index in indices:
            emit(Started(index, CASES[index], "join", MODES[index]))
            emit(Ended(index, Trial(CASES[index], MODES[index], "join", "eager", Status.OK)))

    return play


def dies_in_eager(index: int, *judged: int) -> Play:
    def play(emit: Emit, clock: Clock) -> None:
        judges(*judged)(emit, clock)
        emit(Started(index, CASES[index], "join", ""))
        clock.now += 10
        raise failed()

    return play


def stalls(emit: Emit, clock: Clock) -> None:
    judges(0)(emit, clock)
    emit(Started(1, "b", "join", ""))
    clock.now += 30
    raise failed("stalled", "")


def attempt(
    monkeypatch: pytest.MonkeyPatch, *plays: Play, limit_s: float = 3600
) -> tuple[Stage, list[Status]]:
    stage = Stage(plays)
    monkeypatch.setattr(attempts, "launch", stage.launch)
    monkeypatch.setattr(attempts, "time", stage.clock)
    trials = Attempts(ASKED, Settings("eager"), lambda _: None).run(2, limit_s, None)
    return stage, [trial.status for trial in trials]


OK, LOST, BROKEN = Status.OK, Status.NOT_POSSIBLE, Status.BROKEN


@pytest.mark.parametrize(
    ("plays", "limit_s", "statuses", "limits", "done"),
    [
        pytest.param(
            (dies_in_eager(0), judges(1, 2, 3, 4)),
            *(30, [LOST, OK, OK, OK, OK], [30, 20], [(), (0,)]),
            id="eager that dies on one case is tried on the next",
        ),
        pytest.param(
            (dies_in_eager(0), dies_in_eager(3, 1, 2), judges(4)),
            *(30, [LOST, OK, OK, LOST, OK], [30, 20, 10], [(), (0,), (0, 1, 2, 3)]),
            id="one limit counts for all starts",
        ),
        pytest.param(
            (dies_in_eager(0),),
            *(10, [LOST, *[BROKEN] * 4], [10], [()]),
            id="a rank that dies as the limit passes is still what broke its trial",
        ),
        pytest.param(
            (stalls,),
            *(30, [OK, *[BROKEN] * 4], [30], [()]),
            id="a run whose limit passes is not started again",
        ),
    ],
)
def test_ranks_that_fail_are_started_again_within_one_limit(
    plays: tuple[Play, ...],
    limit_s: float,
    statuses: list[Status],
    limits: list[float],
    done: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, found = attempt(monkeypatch, *plays, limit_s=limit_s)
    assert (found, stage.limits, stage.done) == (statuses, limits, done)


@pytest.mark.parametrize("before", [(), (dies_in_eager(0),)])
def test_a_failure_before_any_trial_is_nobodys(
    before: tuple[Play, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(emit: Emit, clock: Clock) -> None:
        raise failed()

    with pytest.raises(RanksFailed, match="died of SIGKILL"):
        attempt(monkeypatch, *before, dies)


def test_ranks_that_judge_nothing_are_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfrastructureError, match="ended without judging anything"):
        attempt(monkeypatch, judges())
