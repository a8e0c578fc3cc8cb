"""How something long goes: one line that changes, in a terminal alone.

Invariant: it writes to stderr alone; what is written there meanwhile stays above the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


@contextmanager
def status_line(first: str) -> Iterator[Callable[[str], None]]:
    """Show a line; yields what shows another one in its place. ``NO_COLOR`` is respected.

    Args:
        first: what it says at first.
    """
    with Console(stderr=True).status(escape(first)) as status:
        yield lambda line: status.update(escape(line))
