"""A verification, one trial after the other, on ranks that may fail in any of them.

Invariant: every trial that was asked for gets a status, and those that were given up a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpopt.judge.modes import mode
from ddpopt.judge.trials import Asked, Ended, Judging, Settings, Started
from ddpopt.judge.verdict import Finding, Status, Trial
from ddpopt.ranks.failures import RanksFailed

Progress = Callable[[object], None]
"""Told of each `Started` and `Ended`."""
Ask = Callable[..., Any]
"""Has ranks run a method of `Judging`, and returns what the first one returns."""


@dataclass
class Attempts:
    """What was asked for, and what is known of it so far.

    Attributes:
        ask: of ranks. After it has raised `RanksFailed`, the next question goes to new ones.
        asked: what to verify.
        settings: for all of it.
        tell: of each trial.
        time_left: seconds that the whole run may still take.
        device: what the ranks compute on; empty until they have said so.
        given_up: why a mode under an option is not tried again.
        lost: what became of all modes of one case under one option, by the place of that.
    """

    ask: Ask
    asked: Sequence[Asked]
    settings: Settings
    tell: Progress
    time_left: Callable[[], float] = lambda: math.inf
    device: str = ""
    given_up: dict[tuple[str, str], str] = field(default_factory=dict)
    lost: dict[int, Trial] = field(default_factory=dict)

    def run(self) -> tuple[Trial, ...]:
        """Judge everything.

        Returns:
            A trial for everything that was asked.

        Raises:
            RanksFailed: ranks failed where no trial was to blame.
            InfrastructureError: no ranks could be had.
        """
        return tuple(trial for place, one in enumerate(self.asked) for trial in self._modes(place, one))

    def _modes(self, place: int, one: Asked) -> Iterator[Trial]:
        """Judge the modes of one case under one option: none, if eager DDP takes the ranks down."""
        case = one.target if isinstance(one.target, str) else one.target.name
        backend = getattr(self.settings.backend, "__name__", str(self.settings.backend))
        for name in one.modes:
            trial = Trial(case, name, one.option, backend if mode(name).compiles else "", Status.BROKEN)
            if place in self.lost:
                trial = replace(self.lost[place], mode=name)
            elif reason := self.given_up.get((one.option, name), "") or self._too_late():
                trial = replace(trial, reason=reason)
            else:
                trial = self._attempted(place, trial)
            self.tell(Ended(trial))
            yield trial

    def _too_late(self) -> str:
        late = "not tried: the limit of the whole run had passed. Raise it, or ask for less."
        return "" if self.time_left() > 0 else late

    def _attempted(self, place: int, trial: Trial) -> Trial:
        """Start ranks if there are none, have them run eager DDP, and judge a mode."""
        try:
            case, self.device = self.ask(Judging.begin, place)
        except RanksFailed:
            if not (reason := self._too_late()):
                raise
            return replace(trial, reason=reason)
        trial = replace(trial, case=case)
        try:
            self.ask(Judging.prepare, place)
        except RanksFailed as failed:
            self.lost[place] = _without_eager(trial, failed)
            return self.lost[place]
        return self._judged(place, trial)

    def _judged(self, place: int, trial: Trial) -> Trial:
        """Judge a mode. One under which a rank dies is not tried again under that option."""
        self.tell(Started(trial.case, trial.option, trial.mode))
        try:
            judged: Trial = self.ask(Judging.judge, place, trial.mode)
        except RanksFailed as failed:
            if failed.exit_code == 1:
                finding = Finding("run", "the step runs", str(failed), rank=failed.culprits[0].rank)
                return replace(trial, status=Status.WRONG, findings=(finding,))
            why = f"not tried again: on {trial.case} {_in_short(failed)}"
            self.given_up[trial.option, trial.mode] = why
            return replace(trial, reason=str(failed))
        return judged


def _without_eager(trial: Trial, failed: RanksFailed) -> Trial:
    """What becomes of a trial if eager DDP itself takes the ranks down."""
    how = f"on {trial.case}: {_in_short(failed)}"
    if failed.of_time_alone:
        reason = f"eager DDP did not come to an end, {how}. If it is only slow, raise --timeout."
        return replace(trial, backend="", reason=reason)
    reason = f"eager DDP itself fails here, {how}"
    return replace(trial, status=Status.NOT_POSSIBLE, backend="", reason=reason)


def _in_short(failed: RanksFailed) -> str:
    """One line about ranks that failed, without their stacks."""
    one = failed.culprits[0]
    if one.kind == "raised":
        return f"rank {one.rank} raised {one.stack.strip().rpartition(chr(10))[2]}"
    how = f"{one.kind} ({one.signal})" if one.signal else one.kind
    crashed = one.stack.partition("Current thread")[2] or one.stack  # of several, the one that did it
    frames = [line.strip() for line in crashed.splitlines() if line.strip().startswith("File ")]
    where = f", in {frames[0].rpartition('/')[2]}" if frames else ""
    return f"rank {one.rank} {how}{where}"
