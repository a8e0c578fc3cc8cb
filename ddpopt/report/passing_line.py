"""How something long goes: one line that changes in a terminal, a line now and then elsewhere.

Invariant: it writes to stderr alone, and what it says for good is never overwritten.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console

QUIET_S = 15.0
"""Where there is no terminal: seconds between two lines."""
BUSY_S = 0.2
"""Where there is one: seconds between two looks."""


class PassingLine:
    """A line on stderr, shown inside a ``with``.

    Args:
        first: what it says at first, in a terminal.
        quiet_s: seconds between two lines where there is no terminal.
    """

    def __init__(self, first: str, quiet_s: float = QUIET_S) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status(first) if self._console.is_terminal else None
        self._pause_s = quiet_s if self._status is None else BUSY_S
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, line: Callable[[], str]) -> None:
        """Show how it goes, if it was long ago that this was done; only then is the line made."""
        if time.monotonic() - self._said < self._pause_s:
            return
        self._said = time.monotonic()
        if self._status is not None:
            self._status.update(line())
        else:
            self.say(line())

    def say(self, line: str) -> None:
        """Write a line that stays."""
        self._console.print(line, markup=False)


TRIAL_QUIET_S = 10.0
"""Where there is no terminal: seconds between two trials that are told."""


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
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
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
        elif self._done == self._total or time.monotonic() - self._said >= TRIAL_QUIET_S:
            self._said = time.monotonic()
            sys.stderr.write(f"{self._done} of {self._total}: {what}\n")
            sys.stderr.flush()
