"""ddpopt.judge.attempts: ranks that fail are started anew, within one limit, and no trial is lost.

The ranks are played by functions that emit what ranks would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ddpopt.errors import InfrastructureError
from ddpopt.judge import attempts
from ddpopt.judge.attempts import Attempts, hardware
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


def attempt(
    monkeypatch: pytest.MonkeyPatch, *plays: Play, limit_s: float = 3600
) -> tuple[Stage, list[Status]]:
    stage = Stage(plays)
    monkeypatch.setattr(attempts, "launch", stage.launch)
    monkeypatch.setattr(attempts, "time", stage.clock)
    trials = Attempts(ASKED, Settings("eager"), lambda _: None).run(2, limit_s, None)
    return stage, [trial.status for trial in trials]


OK, LOST, BROKEN = Status.OK, Status.NOT_POSSIBLE, Status.BROKEN


def test_eager_that_dies_on_one_case_is_tried_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, statuses = attempt(monkeypatch, dies_in_eager(0), judges(1, 2, 3, 4))
    assert statuses == [LOST, OK, OK, OK, OK]
    assert stage.done == [(), (0,)]


def test_all_launches_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = attempt(monkeypatch, dies_in_eager(0), dies_in_eager(3, 1, 2), judges(4), limit_s=30)
    assert stage.limits == [30, 20, 10]


def test_a_run_whose_limit_passes_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def stalls(emit: Emit, clock: Clock) -> None:
        judges(0)(emit, clock)
        emit(Started(1, "b", "join", ""))
        clock.now += 3600
        raise failed("stalled", "")

    stage, statuses = attempt(monkeypatch, stalls)
    assert statuses == [OK, BROKEN, BROKEN, BROKEN, BROKEN]
    assert len(stage.limits) == 1


def test_a_rank_that_dies_as_the_limit_passes_is_still_what_broke_its_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, statuses = attempt(monkeypatch, dies_in_eager(0), limit_s=10)
    assert statuses == [LOST, BROKEN, BROKEN, BROKEN, BROKEN]


def test_a_failure_before_any_trial_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(emit: Emit, clock: Clock) -> None:
        raise failed()

    with pytest.raises(RanksFailed, match="died of SIGKILL"):
        attempt(monkeypatch, dies)
    with pytest.raises(RanksFailed, match="died of SIGKILL"):
        attempt(monkeypatch, dies_in_eager(0), dies)


def test_ranks_that_judge_nothing_are_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfrastructureError, match="ended without judging anything"):
        attempt(monkeypatch, judges())


def test_a_device_is_named_as_it_is() -> None:
    assert hardware(torch.device("cpu")) == "cpu"
