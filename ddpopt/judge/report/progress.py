"""Showing how far a verification has come: a bar in a terminal, a line now and then elsewhere.

Invariant: everything goes to stderr, so that stdout holds the result alone.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

QUIET_S = 10.0
"""Where there is no terminal: seconds between two lines."""


class TrialProgress:
    """Trials that begin and end.

    Args:
        total: how many there will be.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._said = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting ranks", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def began(self, what: str) -> None:
        """Say what runs now.

        Args:
            what: the trial, in a few words.
        """
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def ended(self, what: str) -> None:
        """Count a trial.

        Args:
            what: the trial and how it ended, in a few words.
        """
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
        elif self._done == self._total or time.monotonic() - self._said >= QUIET_S:
            self._said = time.monotonic()
            sys.stderr.write(f"{self._done} of {self._total}: {what}\n")
            sys.stderr.flush()
