"""How many tests pytest collects in a folder: a test that is lost raises nothing by itself.

Invariant: a folder that cannot be collected gives an error, never a number.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

LIMIT_S = 600.0
COUNT = re.compile(r"^(?:(\d+)/)?(\d+) tests? collected(?: \(\d+ deselected\))? in ", re.MULTILINE)
LAST_LINES = 15


def collected(folders: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Count the tests of folders, each collected in a process of its own.

    Args:
        folders: paths as for pytest.

    Returns:
        By folder, how many tests would run; and by folder why that is not known, where it is not.
    """
    counts: dict[str, int] = {}
    failures: dict[str, str] = {}
    for folder in folders:
        found = _count(folder)
        if isinstance(found, int):
            counts[folder] = found
        else:
            failures[folder] = found
    return counts, failures


def _count(folder: str) -> int | str:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run([*command, folder], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"pytest did not collect it within {LIMIT_S:g} s"
    found = count_in(run.stdout)
    if run.returncode == 0 and found:
        return found
    said = "\n".join((run.stdout + run.stderr).strip().splitlines()[-LAST_LINES:])
    return f"pytest --collect-only ended with exit code {run.returncode}:\n{said}"


def count_in(output: str) -> int | None:
    """Read pytest's last line.

    Args:
        output: of ``pytest --collect-only -q``.

    Returns:
        How many tests would run; None if it does not say.

    >>> count_in("1 test collected in 0.01s"), count_in("3/5 tests collected (2 deselected) in 1s")
    (1, 3)
    >>> count_in("no tests collected in 0.01s")
    """
    found = COUNT.search(output)
    return None if found is None else int(found[1] or found[2])
