"""A verification in ranks of our own, which are started again when a trial has taken them down.

Invariant: all launches together keep to one limit, and every trial that was asked for gets a status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from ddpopt.judge.trials import Asked, Ended, Settings, Started, on_rank, untried
from ddpopt.judge.verdict import Finding, Status, Trial
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.pool import launch

Progress = Callable[[object], None]
"""Told of each `Started` and `Ended`."""


class Attempts:
    """What was asked for, and what is known of it so far.

    Attributes:
        trials: all that were asked for, each as it is when nothing was learned from it, or as it ended.
        done: indices of those that have ended or were given up.
        device: what the ranks compute on; empty until they have said so.
    """

    def __init__(self, asked: Sequence[Asked], settings: Settings, tell: Progress) -> None:
        self.trials = list(untried(asked, settings))
        self.done: set[int] = set()
        self.device = ""
        self._task = (on_rank, asked, settings)
        self._tell = tell
        self._running: Started | None = None

    def run(self, nproc: int, limit_s: float, device: str | None) -> tuple[Trial, ...]:
        """Judge everything.

        Args:
            nproc: how many ranks to start.
            limit_s: of the whole run, in seconds.
            device: for `ddpopt.ranks.pool.launch`.

        Returns:
            A trial for everything that was asked.

        Raises:
            RanksFailed: ranks failed before any trial had begun.
            InfrastructureError: no ranks could be had.
        """
        deadline = time.monotonic() + limit_s
        while left := [index for index in range(len(self.trials)) if index not in self.done]:
            left_s = deadline - time.monotonic()
            if self.done and left_s <= 0:
                passed = f"not tried: the limit of the whole run, {limit_s:g} s, had passed"
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
        """Give up what a failure of the ranks took with it.

        If it was eager DDP itself that ran, those are all modes of that case under that option; else the
        trial that ran, and unless it only raised, the same mode under the same option on later cases.
        """
        case, one = began.case, [began.index]
        if not began.mode:
            status = Status.BROKEN if failed.of_time_alone else Status.NOT_POSSIBLE
            reason = f"eager DDP itself fails here, on {case}: {failed}"
            self._end(self._left("case", "option", began.index), case=case, status=status, reason=reason)
        elif failed.exit_code == 1:
            finding = Finding("run", "the step runs", str(failed), rank=failed.culprits[0].rank)
            self._end(one, case=case, status=Status.WRONG, findings=(finding,))
        else:
            self._end(one, case=case, reason=str(failed))
            reason = f"not tried again: it took the ranks down on {case}"
            self._end(self._left("option", "mode", began.index), reason=reason)

    def _left(self, first: str, second: str, like: int) -> list[int]:
        """What is yet to be judged and agrees with a trial in two fields."""
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
            if isinstance(event, Ended):
                self.trials[event.index] = event.trial
                self.done.add(event.index)
            self._tell(event)
