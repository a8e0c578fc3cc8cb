"""Hard time limits: a process that reaches its limit writes all its stacks and ends.

A faulthandler thread keeps the time. It does not need the GIL, so a loop inside C, or a collective that no
other rank enters, is ended as reliably as a sleep.

Invariant: faulthandler's timer is always set to the earliest limit in force in this process.
"""

import faulthandler
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import IO

STDERR = 2
# faulthandler does not accept a timeout of zero.
SOONEST_S = 0.001

_in_force: list[tuple[float, IO[str] | int]] = []
"""End and stack file of all `Limits` in this process: faulthandler has a single timer."""


class Limits:
    """Sets limits, which may be nested, in one thread, and records what the thread is doing."""

    def __init__(self, file: IO[str] | int = STDERR, note: Callable[[str], None] = lambda _: None) -> None:
        """Set no limit yet.

        Args:
            file: where stacks are written: a file that has a descriptor, or a descriptor.
            note: called with a description of what the process does, whenever that changes.
        """
        self._file = file
        self._notify = note
        self._doing = ""

    def note(self, what: str) -> None:
        """Set the description of what this process does from now on.

        Args:
            what: description for the report of a failure.
        """
        self._doing = what
        self._notify(what)

    @contextmanager
    def limited(self, seconds: float, what: str) -> Iterator[None]:
        """End this process if the block does not end in time.

        Args:
            seconds: the limit.
            what: description of the block, for the report.
        """
        before = self._doing
        self.note(what)
        limit = (time.monotonic() + seconds, self._file)
        _in_force.append(limit)
        _set_timer()
        try:
            yield
        finally:
            _in_force.remove(limit)
            _set_timer()
        # After an exception the innermost block is the one that failed, so its note stays.
        self.note(before)


def earliest_end() -> float | None:
    """When the earliest limit in force ends this process, by ``time.monotonic()``; None if there is none."""
    return min((end for end, _ in list(_in_force)), default=None)


def _set_timer() -> None:
    faulthandler.cancel_dump_traceback_later()
    if _in_force:
        end, file = min(_in_force, key=itemgetter(0))
        faulthandler.dump_traceback_later(max(end - time.monotonic(), SOONEST_S), exit=True, file=file)
