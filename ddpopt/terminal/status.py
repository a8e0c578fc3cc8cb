"""Show on stderr what goes on: one line on a terminal, a line for each phase in a log."""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape

EVERY_S = 10.0
"""Seconds between two lines about one phase in a log."""


@contextmanager
def status_line(first: str) -> Iterator[Callable[[Any], None]]:
    """Show on stderr what goes on; yields a function that takes what begins.

    On a terminal it is one line, below all other output to stderr. In a log it is a line for each phase:
    texts that differ only in numbers are one phase, of which a line appears every `EVERY_S` seconds.
    ``NO_COLOR`` is respected; ``FORCE_COLOR`` makes no terminal.

    Args:
        first: the first text; on a terminal only.
    """
    if not sys.stderr.isatty():
        yield _PhaseLog()
        return
    with Console(stderr=True, force_terminal=sys.stderr.isatty()).status(escape(first)) as status:
        yield lambda line: status.update(escape(line))


class _PhaseLog:
    """Prints what begins, in a log."""

    def __init__(self) -> None:
        self._phase = ""
        self._printed_s = 0.0

    def __call__(self, line: Any) -> None:
        phase = re.sub(r"\d+", "", str(line))
        now_s = time.monotonic()
        is_due = phase != self._phase or now_s - self._printed_s >= EVERY_S
        if is_due and os.environ.get("RANK", "0") == "0":  # torchrun shows all ranks
            sys.stderr.write(f"ddpopt: {line}\n")
            sys.stderr.flush()
            self._phase = phase
            self._printed_s = now_s
