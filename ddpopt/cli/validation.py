"""What the command line is refused for before anything runs: files, limits, and what would be ignored.

Invariant: what is refused here costs no time; nothing on the command line is ignored in silence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from ddpopt.cli.options import STDOUT
from ddpopt.errors import UsageError

__all__ = ["require_heeded", "require_positive", "require_taken", "require_writable"]

OWN_TO_MATRIX = {
    "bucket_cap_mb": "its options set DDP's arguments",
    "bucket_cap_mb_list": "its options set DDP's arguments",
    "find_unused_parameters": "its options set DDP's arguments",
    "static_graph": "its options set DDP's arguments",
    "strategy": "its modes say the strategy",
    "reproduction": "it does not look where something goes wrong",
    "locate_timeout": "it does not look where something goes wrong",
}
"""What is given to no purpose beside ``--matrix``, and why."""
TAKEN_BY_SELF_TEST = ("self_test", "nproc", "json", "junit", "html", "github")


def require_writable(option: str, file: str | None) -> None:
    """Fail before minutes of work, not after.

    Args:
        option: that names the file.
        file: where to write; None for nowhere.

    Raises:
        UsageError: it cannot be written there.
    """
    if file is None or (file == STDOUT and option == "--json"):
        return
    if file == STDOUT:
        raise UsageError(f"{option}: expected the name of a file, got {file!r}; only --json goes to stdout")
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UsageError(f"{option}: cannot write {file!r}; name a file in a folder that can be written to")


def require_positive(option: str, seconds: float) -> None:
    """Refuse a limit at which nothing could be done, or never.

    Args:
        option: that sets it.
        seconds: the limit.

    Raises:
        UsageError: it is no positive finite number.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option}: expected a positive number of seconds, got {seconds!r}")


def require_heeded(given: Sequence[str]) -> None:
    """Ignore nothing in silence that stands on the command line.

    Args:
        given: names of the parameters that do.

    Raises:
        UsageError: one of them has no meaning beside another.
    """
    if "matrix" in given:
        for name in given:
            if name in OWN_TO_MATRIX:
                raise UsageError(
                    f"{_spelled(name)}: has no meaning beside --matrix: {OWN_TO_MATRIX[name]}; leave it out"
                )
    if "strategy" in given and "mode" in given:
        raise UsageError(
            "--strategy: has no meaning beside --mode: modes say the strategy, as ddpopt-split and "
            "ddpopt-inline do; leave one of the two out"
        )


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def require_taken(given: Sequence[str]) -> None:
    """Refuse what a self-test would ignore: it has cases, modes and options of its own.

    Args:
        given: names of the parameters that stand on the command line.

    Raises:
        UsageError: one of them has no meaning here.
    """
    others = [_spelled(name) for name in given if name not in TAKEN_BY_SELF_TEST]
    if others:
        raise UsageError(
            f"--self-test: expected --nproc and files for reports beside it, got {', '.join(others)}; "
            "it has cases, modes and options of its own"
        )
