"""Hard limits for pieces of work: at its limit a process writes all its stacks and ends.

A thread of faulthandler's keeps the time. It needs no lock of Python's, so a loop inside C, or a collective
that nobody else enters, ends as surely as a sleep.

Invariant: at every moment faulthandler's timer is set to the earliest limit that is in force in this process.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import IO

STDERR = 2
# faulthandler takes no time of zero.
SOONEST_S = 0.001
# How long faulthandler's timer waits for a limit to be announced; a busy machine starts threads late.
ANNOUNCING_S = 1.0


_in_force: list[tuple[float, IO[str] | int]] = []
"""When they end and where stacks go, of all `Limits` of this process: faulthandler has one timer for all."""


class Limits:
    """Sets limits, which may be nested, in one thread, and keeps track of what it does."""

    def __init__(
        self,
        file: IO[str] | int = STDERR,
        note: Callable[[str], None] = lambda _: None,
        announce: Callable[[float, str, str], None] | None = None,
    ) -> None:
        """Set no limit yet.

        Args:
            file: where stacks go: a file that has a descriptor, or a descriptor.
            note: called with what the process does, whenever that changes.
            announce: called when a limit has passed (seconds, what for, stacks), instead of stacks in the
                file; unless a loop inside C keeps Python's lock.
        """
        self._file = file
        self._tell = note
        self._announce = announce
        self._doing = ""

    def note(self, what: str) -> None:
        """Say what this process does from now on.

        Args:
            what: for the report of a failure.
        """
        self._doing = what
        self._tell(what)

    @contextmanager
    def limited(self, seconds: float, what: str) -> Iterator[None]:
        """End this process if the block does not end in time.

        Args:
            seconds: the limit.
            what: what the block does, for the report.
        """
        before = self._doing
        self.note(what)
        late_s = 0.0 if self._announce is None else ANNOUNCING_S
        limit = (time.monotonic() + seconds + late_s, self._file)
        _in_force.append(limit)
        _set_timer()
        announcing = self._announcing(seconds, what)
        try:
            yield
        finally:
            if announcing is not None:
                announcing.cancel()
            _in_force.remove(limit)
            _set_timer()
        # After an exception, what the innermost block did is what failed.
        self.note(before)

    def _announcing(self, seconds: float, what: str) -> threading.Timer | None:
        if self._announce is None:
            return None
        timer = threading.Timer(seconds, _end, (self._announce, seconds, what))
        timer.daemon = True
        timer.start()
        return timer


def _end(announce: Callable[[float, str, str], None], seconds: float, what: str) -> None:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        announce(seconds, what, file.read())
    os._exit(1)


def _set_timer() -> None:
    faulthandler.cancel_dump_traceback_later()
    if _in_force:
        end, file = min(_in_force, key=itemgetter(0))
        faulthandler.dump_traceback_later(max(end - time.monotonic(), SOONEST_S), exit=True, file=file)
