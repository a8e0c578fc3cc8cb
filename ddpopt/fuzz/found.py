"""The failures that ship: found by fuzzing, made small, each with what fails.

They lie in ``ddpopt/testing/corpus/found`` as data: a case, and beside it a script that shows it, where the
fault is torch's own; it is never imported. What was a fault of ddpopt's is mended, and has no script.
Invariant: a script is what `ddpopt.fuzz.scripting` writes today for its case, or for the same case so large
that torch cuts it without any setting of ours, or with more steps.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from pathlib import Path

from ddpopt.fuzz.asking import as_scripted
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.scripting import script_of

FOLDER = Path(str(files("ddpopt.testing.corpus"))) / "found"


@functools.cache
def found_cases() -> tuple[FoundCase, ...]:
    """Return all failures that ship, by name of the file.

    Raises:
        UsageError: a file there is no case.
    """
    return tuple(FoundCase.read(file) for file in sorted(FOLDER.glob("*.json")))


def script_file(case: FoundCase) -> Path:
    """The file with the script of a failure that ships."""
    return FOLDER / f"{case.stem}.py"


def scripts_of(case: FoundCase) -> list[str]:
    """What the script of a failure may say: for the case itself, or for what shows it better.

    Args:
        case: one that ships.
    """
    name = script_file(case).name
    return [script_of(candidate, name) for candidate in as_scripted(case)]
