"""The failures that fuzzing found, made small: ``tests/data/found`` has a file for each, with what fails.

What was a fault of ddpopt's is mended; what is torch's own is shown by the script that
`ddpopt.fuzz.scripting` writes of it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from ddpopt.fuzz.cases import FoundCase

FOLDER = Path(__file__).parent / "data" / "found"


@functools.cache
def found_cases() -> tuple[FoundCase, ...]:
    """Return all failures, by name of the file."""
    return tuple(FoundCase.read(file) for file in sorted(FOLDER.glob("*.json")))
