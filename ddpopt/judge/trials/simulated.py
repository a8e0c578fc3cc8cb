"""Requested trials on simulated ranks: each in one process, and several processes side by side.

Invariant: every requested trial has a result at the end, in the order of the requests.
"""

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpopt.judge.trials.attempts import Attempts, Progress
from ddpopt.judge.trials.on_rank import Request, Settings
from ddpopt.judge.verdict import Trial


class Shares:
    """Divides trials among processes of this machine.

    Args:
        requests: the requests.
        settings: the settings for all trials.
        tell: called with each event.

    Attributes:
        device: the device the processes compute on; empty until they report it.
    """

    def __init__(self, requests: Sequence[Request], settings: Settings, tell: Progress) -> None:
        self._requests = [
            Request(request.target, request.option, (mode,)) for request in requests for mode in request.modes
        ]
        self._settings = settings
        self._tell = tell
        self._lock = threading.Lock()
        self.device = ""

    def run(self, limit_s: float, device: str | None) -> tuple[Trial, ...]:
        """Judge everything.

        Args:
            limit_s: limit of the whole run, in seconds.
            device: as for `ddpopt.ranks.pool.launch`; on a GPU there is only one process.

        Returns:
            Every requested trial.

        Raises:
            RanksFailed: a process failed before any trial had begun.
            InfrastructureError: no process could be started.
        """
        count = len(self._requests)
        workers = 1 if device == "cuda" else min(count, os.cpu_count() or 1)
        trials: list[Trial | None] = [None] * count
        errors: list[Exception] = []

        def work(indices: Sequence[int]) -> None:
            try:
                found = self._share(indices, limit_s, device)
            except Exception as error:
                errors.append(error)
                return
            for index, trial in zip(indices, found, strict=True):
                trials[index] = trial

        shares = [range(first, count, workers) for first in range(workers)]
        # daemons: an interrupted run does not wait for them, and their processes end with this one
        threads = [threading.Thread(target=work, args=(share,), daemon=True) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return tuple(trial for trial in trials if trial is not None)

    def _share(self, indices: Sequence[int], limit_s: float, device: str | None) -> tuple[Trial, ...]:
        requests = [self._requests[index] for index in indices]

        def tell(event: Any) -> None:
            with self._lock:
                self._tell(replace(event, index=indices[event.index]))

        attempts = Attempts(requests, self._settings, tell)
        trials = attempts.run(1, limit_s, device)
        self.device = attempts.device
        return trials
