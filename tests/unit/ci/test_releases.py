"""ci.releases: a release's row says what ran, what failed and what differs, and claims nothing else."""

import json
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest
import torch

from ci.releases import HEAD, NO_RESULT, NOT_RUN, PAGE, write_row

RESULTS = {"right": "", "wrong[a|b]": "<failure/>", "gone": "<error/>", "left": "<skipped/>"}
ROWS = [f"| {' | '.join(HEAD)} |", "|---" * 7 + "|", "| 2.99.0 | 3.11.1 | a |", "| 2.3.0 | 3.11.1 | b |"]
DIFFERS = "matrix, `torch` under `join`: wrong, newest release: ok (2 cases)"


def suite(*names: str) -> str:
    cases = (f'<testcase classname="unit" name="{name}">{RESULTS[name]}</testcase>' for name in names)
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def trials(status: str) -> str:
    cells = [("torch", "join", "a", status), ("torch", "join", "b", status), ("eager", "join", "a", "ok")]
    keys = ("mode", "option", "case", "status")
    return json.dumps({"trials": [dict(zip(keys, cell, strict=True)) for cell in cells]})


@pytest.mark.parametrize(
    ("files", "cells"),
    [
        ({}, [NOT_RUN] * 4),
        ({"test.xml": ""}, [NO_RESULT, NOT_RUN, NOT_RUN, f"tests {NO_RESULT}"]),
        ({"self-test.xml": suite("right")}, [NOT_RUN, "1 passed, 0 failed, 0 skipped", NOT_RUN, "nothing"]),
        (
            {"test.xml": suite(*RESULTS), "matrix.json": trials("wrong"), "matrix.commit": "5c7ab1e\n"},
            ["1 passed, 2 failed, 1 skipped", NOT_RUN, "1 ok, 2 wrong (5c7ab1e)",
             f"`unit.wrong[a&#124;b]` failed; `unit.gone` failed; {DIFFERS}"],
        ),
    ],
)  # fmt: skip
def test_a_row_says_what_ran_and_what_differs_and_other_rows_stay(
    files: dict[str, str], cells: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.delenv("PYTEST_ARGS", raising=False)
    for release, left in (("2.15.0", {"matrix.json": trials("ok")}), ("2.13.0", files)):
        results = tmp_path / release / "results"
        results.mkdir(parents=True)
        for name, text in left.items():
            (results / name).write_text(text)
    page = tmp_path / "support.md"
    page.write_text("\n".join(["before", *ROWS, "", "after"]), encoding="utf-8")
    row = write_row(results, page)
    assert page.read_text(encoding="utf-8").split("\n") == ["before", *ROWS[:3], row, ROWS[3], "", "after"]
    assert row.strip("| ").split(" | ")[3:] == cells
    assert "\n".join(ROWS[:2]) in PAGE.read_text(encoding="utf-8")


def test_the_metadata_make_and_the_page_name_the_same_releases_of_python() -> None:
    low, high = sorted(re.findall(r"3\.(\d+)", str(metadata("ddpopt")["Requires-Python"])))
    make = PAGE.parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    assert f"not (3, {low}) <= sys.version_info < (3, {high})" in make
    assert f"needs Python 3.{low} to 3.{int(high) - 1}," in make
    assert f"| Python | 3.{low} to 3.{int(high) - 1}. pip refuses others" in PAGE.read_text(encoding="utf-8")
