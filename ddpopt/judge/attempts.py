"""A verification in ranks of our own, which are started anew when a trial has taken them down.

Invariant: all launches together keep to one limit, and every trial that was asked for gets a status.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ddpopt.errors import InfrastructureError
from ddpopt.judge.lost import lost_trials, stopped, too_late
from ddpopt.judge.trials import Asked, Ended, Settings, Started, keep_for_good, quickly, run_trials
from ddpopt.judge.verdict import Trial
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.group import Ranks
from ddpopt.ranks.pool import launch

__all__ = ["Attempts", "Progress", "hardware"]

Progress = Callable[[object], None]
"""Told of each `Started` and `Ended`."""


class Attempts:
    """What was asked for, and what is known of it so far.

    Attributes:
        done: the trials that have ended or were given up, by index.
        device: what the ranks compute on; empty until they have said so.
    """

    def __init__(self, asked: Sequence[Asked], settings: Settings, tell: Progress) -> None:
        self.done: dict[int, Trial] = {}
        self.device = ""
        self._asked = asked
        self._settings = settings
        self._tell = tell
        self._running: Started | None = None

    def run(self, nproc: int, limit_s: float, device: str | None) -> tuple[Trial, ...]:
        """Judge everything.

        Args:
            nproc: how many ranks to start.
            limit_s: of the whole run, in seconds.
            device: for `ddpopt.ranks.group.launch`.

        Returns:
            A trial for everything that was asked.

        Raises:
            RanksFailed: ranks failed before any trial had begun.
            InfrastructureError: no ranks could be had.
        """
        deadline = time.monotonic() + limit_s
        wanted = sum(len(one.modes) for one in self._asked)
        while len(self.done) < wanted:
            before = len(self.done)
            self._launch(nproc, deadline, device)
            if time.monotonic() >= deadline:
                self._note_all(too_late(self._asked, self._settings, tuple(self.done), limit_s))
            if len(self.done) == before:
                raise InfrastructureError("the ranks ended without judging anything; this is a bug in ddpopt")
        return tuple(self.done[index] for index in range(wanted))

    def _launch(self, nproc: int, deadline: float, device: str | None) -> None:
        task = (_on_rank, self._asked, self._settings, tuple(self.done))
        left_s = deadline - time.monotonic()
        try:
            launch(*task, nproc=nproc, limit_s=left_s, device=device, on_event=self._note)
        except RanksFailed as failed:
            is_late = time.monotonic() >= deadline
            if self._running is None:
                if not (self.done and is_late):
                    raise
                return
            is_limit = is_late and all(one.kind == "stalled" for one in failed.culprits)
            lost = stopped if is_limit else lost_trials
            self._note_all(lost(self._asked, self._settings, self._running, failed))

    def _note_all(self, trials: Mapping[int, Trial]) -> None:
        for index, trial in trials.items():
            self._note(Ended(index, trial))

    def _note(self, event: object) -> None:
        if isinstance(event, _Placed):
            self.device = event.device
        elif isinstance(event, (Started, Ended)):
            self._running = event if isinstance(event, Started) else None
            if isinstance(event, Ended):
                self.done[event.index] = event.trial
            self._tell(event)


@dataclass(frozen=True)
class _Placed:
    """An event: the ranks are there, and compute on this."""

    device: str


def _on_rank(ranks: Ranks, asked: Sequence[Asked], settings: Settings, done: Sequence[int]) -> None:
    ranks.emit(_Placed(hardware(ranks.device)))
    with quickly():  # in a process of our own, whose garbage each run of the collector would look through
        run_trials(ranks, asked, settings, done, keep_for_good)


def hardware(device: torch.device) -> str:
    """Name what a rank computes on.

    Args:
        device: of the rank.

    Returns:
        ``"cpu"``, or ``"cuda"`` with the name of the GPU.
    """
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type
