"""Tests of `benchmarks.summary`: what was asked and whether it held, and the page that is made from it."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.report import Grid, Section, at_most
from benchmarks.summary import MEASUREMENTS, PAGE, RESULTS, main, stored

CONDITIONS = {"command": "python -m x", "processor": "A | B"}
HELD = at_most("gpt", "inline to one graph", 1.04, 1.05, spread=(1.0, 1.1), limit=1.0)
GRID = Grid("all", ("mode", "s"), (("inline", "1.0"),))
GOOD = {name: Section(name, CONDITIONS, (HELD,), (GRID,)) for name in MEASUREMENTS}


def test_all_held_is_exit_code_zero_and_a_measurement_that_left_no_file_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, section in GOOD.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**asdict(section), "figures": []}))
    assert main(["--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "inline to one graph" in shown
    assert "not measured" not in shown
    (tmp_path / "compile.json").unlink()
    assert main(["--results", str(tmp_path)]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not measured" in line)
    assert "compile" in line


def test_the_documentation_names_each_measurement_and_each_fraction_in_its_tables_is_a_stored_figure() -> (
    None
):
    sections = [section for name in stored(RESULTS) for section in stored(RESULTS)[name]]
    cells = [cell for section in sections for claim in section.claims for cell in claim.cells]
    cells += [cell for section in sections for grid in section.grids for row in grid.rows for cell in row]
    known = {number for cell in cells for number in re.findall(r"\d+\.\d+", cell)}
    commands, _, results = PAGE.read_text(encoding="utf-8").partition("# Results")
    assert [
        name for name in MEASUREMENTS if f"| {name} | `python -m benchmarks.{name}` |" not in commands
    ] == []
    rows = [line for line in results.splitlines() if line.startswith("|") and "at least" not in line]
    shown = {number for row in rows for number in re.findall(r"\d+\.\d+", row)}
    assert shown
    assert shown - known == set()
