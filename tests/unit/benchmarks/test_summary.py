"""Tests of `benchmarks.summary`: the page that is made from it."""

import re

from benchmarks.summary import MEASUREMENTS, PAGE, RESULTS, stored


def test_the_page_names_each_measurement_and_each_fraction_in_its_tables_is_a_stored_figure() -> None:
    sections = [section for name in stored(RESULTS) for section in stored(RESULTS)[name]]
    cells = [cell for section in sections for claim in section.claims for cell in claim.cells]
    cells += [cell for section in sections for grid in section.grids for row in grid.rows for cell in row]
    known = {number for cell in cells for number in re.findall(r"\d+\.\d+", cell)}
    commands, _, results = PAGE.read_text(encoding="utf-8").partition("# Results")
    assert {*MEASUREMENTS} <= {*re.findall(r"\| (\w+) \| `python -m benchmarks\.\1` \|", commands)}
    rows = [line for line in results.splitlines() if line.startswith("|") and "at least" not in line]
    shown = {number for row in rows for number in re.findall(r"\d+\.\d+", row)}
    assert shown
    assert shown - known == set()
