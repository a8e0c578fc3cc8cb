"""What the measurements' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def some_of(known: Sequence[str], text: str) -> tuple[str, ...]:
    """Read names that are separated by commas, each once.

    Args:
        known: those that there are.
        text: as it stands on the command line.

    Raises:
        argparse.ArgumentTypeError: there is none of such a name.

    >>> some_of(("eager", "torch"), "torch,eager,torch")
    ('torch', 'eager')
    """
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {unknown[0]!r}")
    return names
