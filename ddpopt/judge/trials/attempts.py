"""Requested trials on ranks of our own, which are started again after a trial that ends them.

Invariant: every requested trial has a result at the end, and no trial is tried twice.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ddpopt.judge.rules.failing import FailedAloneError
from ddpopt.judge.rules.outcome import JUDGE_FAILED
from ddpopt.judge.trials.on_rank import Ended, Request, Settings, Started, on_rank, requested_trials
from ddpopt.judge.verdict import Finding, Status, Trial
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.pool import launch

Progress = Callable[[object], None]
"""Called with each `Started` and `Ended`."""


class Attempts:
    """The requested trials, and their results so far.

    Attributes:
        trials: all requested trials, each with its result, or with the default one until it has ended.
        done: indices of the trials that have ended or were given up.
        device: the device the ranks compute on; empty until they report it.
    """

    def __init__(self, requests: Sequence[Request], settings: Settings, tell: Progress) -> None:
        self.trials = list(requested_trials(requests, settings))
        self.done: set[int] = set()
        self.device = ""
        self._task = (on_rank, requests, settings)
        self._notify = tell
        self._running: Started | None = None
        self._began_s = time.monotonic()

    def run(self, nproc: int, limit_s: float, device: str | None) -> tuple[Trial, ...]:
        """Judge everything.

        Args:
            nproc: the number of ranks to start.
            limit_s: limit of the whole run, in seconds.
            device: for `ddpopt.ranks.pool.launch`.

        Returns:
            Every requested trial.

        Raises:
            RanksFailed: ranks failed before any trial had begun.
            InfrastructureError: no ranks could be started.
        """
        deadline = time.monotonic() + limit_s
        while left := [index for index in range(len(self.trials)) if index not in self.done]:
            left_s = deadline - time.monotonic()
            if self.done and left_s <= 0:
                passed = f"not tried: the time limit of the whole run, {limit_s:g} s, had passed"
                self._end(left, reason=f"{passed}. Raise it, or ask for less.")
                break
            task = (*self._task, tuple(sorted(self.done)))
            try:
                launch(*task, nproc=nproc, limit_s=left_s, device=device, on_event=self._note)
            except RanksFailed as failed:
                if self._running is not None:
                    self._lose(self._running, failed)
                elif not self.done or time.monotonic() < deadline:
                    raise
        return tuple(self.trials)

    def _lose(self, began: Started, failed: RanksFailed) -> None:
        """Give up the trials that a failure of the ranks affects.

        If eager DDP was running, these are all modes of that case under that option; otherwise the running
        trial and, unless it only raised, the same mode under the same option on later cases.
        """
        case = began.case
        seconds = round(time.monotonic() - self._began_s, 1)
        culprit = failed.culprits[0]
        of_program = FailedAloneError.__name__ in culprit.error
        known: dict[str, Any] = {"case": case, "seconds": seconds}
        if not began.mode:
            what = f"eager DDP itself did not end here, on {case}"
            if failed.exit_code == 1:
                what = "eager DDP itself fails here" if of_program else JUDGE_FAILED
                known["status"] = Status.NOT_POSSIBLE if of_program else Status.BROKEN
            self._end(self._left("case", "option", began.index), **known, reason=f"{what}: {failed}")
        elif of_program:
            text = culprit.error.partition(f"{FailedAloneError.__name__}: ")[2]
            finding = Finding("run", "the step runs", text, rank=culprit.rank)
            self._end([began.index], **known, status=Status.WRONG, findings=(finding,))
        elif failed.exit_code == 1:  # what a program raises is caught where it runs
            self._end([began.index], **known, reason=f"{JUDGE_FAILED}: {failed}")
        else:
            self._end([began.index], **known, reason=str(failed))
            reason = f"not tried again: it crashed the ranks on {case}"
            self._end(self._left("option", "mode", began.index), reason=reason)

    def _left(self, first: str, second: str, like: int) -> list[int]:
        """The pending trials that agree with a trial in two fields."""
        of = attrgetter(first, second)
        return [
            index
            for index, trial in enumerate(self.trials)
            if index not in self.done and of(trial) == of(self.trials[like])
        ]

    def _end(self, indices: Iterable[int], **known: Any) -> None:
        for index in indices:
            self._note(Ended(index, replace(self.trials[index], **known)))

    def _note(self, event: object) -> None:
        if isinstance(event, str):
            self.device = event
        elif isinstance(event, (Started, Ended)):
            self._running = event if isinstance(event, Started) else None
            self._began_s = time.monotonic()
            if isinstance(event, Ended):
                self.trials[event.index] = event.trial
                self.done.add(event.index)
            self._notify(event)
