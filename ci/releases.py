"""Write a release's row into docs/support.md: ``python -m ci.releases RESULTS``, as ci/releases.sh does.

RESULTS is the folder ``HOME/RELEASE/results`` with what the parts left: ``test.xml`` and ``self-test.xml``,
JUnit XML of pytest, ``matrix.json``, and ``PART.commit``, the commit that ran. A part without a file did not
run; one with an empty file ended without a result.

Invariant: a row claims nothing that no file says, and the rows of other releases stay as they are.
"""

import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch
from junitparser import Error, Failure, JUnitXml, Skipped

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
HEAD = ("torch", "Python", "date", "tests", "self-test", "matrix", "what differs")
NOT_RUN, NO_RESULT = "not run", "ended without a result"
SHOWN = 20
"""Names and cells in one row, at most."""


def write_row(results: Path, page: Path = PAGE) -> str:
    """Put the row of a release into a page's table, the newest release first.

    Args:
        results: the folder with the results of the release that runs this.
        page: has one table with `HEAD`.

    Returns:
        The row.
    """
    before, head, rows, after = _parted(page.read_text(encoding="utf-8"))
    row = _row(torch.__version__.partition("+")[0], results)
    kept = [other for other in rows if _key(other) != _key(row)]
    ordered = sorted([*kept, row], key=_key, reverse=True)
    page.write_text("\n".join([*before, *head, *ordered, *after]), encoding="utf-8")
    return row


def _parted(text: str) -> tuple[list[str], list[str], list[str], list[str]]:
    lines = text.split("\n")
    start = lines.index(_line(HEAD))
    end = next(place for place in range(start, len(lines)) if not lines[place].startswith("|"))
    return lines[:start], lines[start : start + 2], lines[start + 2 : end], lines[end:]


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _key(row: str) -> tuple[list[int], list[int]]:
    """Numbers of torch's release and Python's, without the patch: one row for each such pair."""
    torchs, pythons = row.split(" | ")[:2]
    return [*map(int, re.findall(r"\d+", torchs)[:2])], [*map(int, re.findall(r"\d+", pythons)[:2])]


def _row(version: str, results: Path) -> str:
    tests, failed = _tests(results / "test.xml")
    self_test, undetected = _tests(results / "self-test.xml")
    matrix, cells = _matrix(results)
    parts = {"tests": tests, "self-test": self_test, "matrix": matrix}
    ended = [f"{part} {NO_RESULT}" for part, said in parts.items() if said == NO_RESULT]
    chosen = os.environ.get("PYTEST_ARGS", "")
    ended += [f"tests chosen with `{chosen}`"] * bool(chosen)
    differs = [*ended, *(f"`{name}` failed" for name in (*failed, *undetected)), *cells]
    more = [f"and {len(differs) - SHOWN} more"] if len(differs) > SHOWN else []
    nothing = NOT_RUN if {*parts.values()} == {NOT_RUN} else "nothing"
    what = "; ".join([*differs[:SHOWN], *more]) or nothing
    today = date.today().isoformat()
    shown = (said + _commit(results / f"{part}.commit") for part, said in parts.items())
    return _line((version, platform.python_version(), today, *shown, what))


def _commit(file: Path) -> str:
    return f" ({file.read_text(encoding='utf-8').strip()})" if file.exists() else ""


def _tests(file: Path) -> tuple[str, list[str]]:
    """Counts, and the names of the tests that failed."""
    if not file.exists():
        return NOT_RUN, []
    if not file.stat().st_size:
        return NO_RESULT, []
    cases = [case for suite in JUnitXml.fromfile(str(file)) for case in suite]
    if not cases:
        return NO_RESULT, []
    kinds = [{type(result) for result in case.result} for case in cases]
    names = [
        f"{case.classname}.{case.name}"
        for case, kind in zip(cases, kinds, strict=True)
        if kind & {Failure, Error}
    ]
    skipped = sum(kind == {Skipped} for kind in kinds)
    passed = len(cases) - len(names) - skipped
    return f"{passed} passed, {len(names)} failed, {skipped} skipped", names


def _matrix(results: Path) -> tuple[str, list[str]]:
    """Counts, and the cells that differ from those of the newest release that has any."""
    file = results / "matrix.json"
    if not file.exists():
        return NOT_RUN, []
    if not file.stat().st_size:
        return NO_RESULT, []
    own = _cells(file)
    found = [one for one in results.parents[1].glob("*/results/matrix.json") if one.stat().st_size]
    newest = _cells(max(found, key=lambda one: [*map(int, re.findall(r"\d+", one.parts[-3]))]))
    statuses = [*own.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted({*statuses}))
    both = {cell: (own.get(cell, NOT_RUN), newest.get(cell, NOT_RUN)) for cell in [*own, *newest]}
    differ = Counter((*cell[:2], *pair) for cell, pair in both.items() if pair[0] != pair[1])
    return counts, [
        f"matrix, `{mode}` under `{option}`: {here}, newest release: {there} ({number} cases)"
        for (mode, option, here, there), number in differ.items()
    ]


def _cells(file: Path) -> Mapping[tuple[str, str, str], str]:
    trials = json.loads(file.read_text(encoding="utf-8"))["trials"]
    return {(trial["mode"], trial["option"], trial["case"]): trial["status"] for trial in trials}


if __name__ == "__main__":
    print(write_row(Path(sys.argv[1])))
