"""How something long goes: one line that changes in a terminal, a line now and then elsewhere.

Invariant: it writes to stderr alone, and what it says for good is never overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console

QUIET_S = 10.0
"""Without a terminal: seconds between two lines."""
BUSY_S = 0.2
"""In a terminal: seconds between two updates."""


class StatusLine:
    """A line on stderr, shown inside a ``with``.

    Args:
        first: what it says at first, in a terminal.
    """

    def __init__(self, first: str) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status(first) if self._console.is_terminal else None
        self._pause_s = QUIET_S if self._status is None else BUSY_S
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, line: Callable[[], str]) -> None:
        """Show how it goes, unless that was done a moment ago; only then is the line made."""
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


def counting(line: StatusLine, total: int) -> Callable[[str], None]:
    """Return what shows each of `total` pieces of work as it begins.

    Args:
        line: where.
        total: how many there will be.
    """
    begun = 0

    def begin(what: str) -> None:
        nonlocal begun
        begun += 1
        line.show(lambda: f"{begun} of {total}: {what}")

    return begin
