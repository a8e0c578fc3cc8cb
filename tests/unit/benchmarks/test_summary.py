"""Tests of `benchmarks.summary`: what was asked and whether it held, and the page that is made from it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Claim, Grid, Section, at_least, at_most, missing, section_of
from benchmarks.step_workloads import WORKLOADS
from benchmarks.summary import (
    BEGIN,
    END,
    MEASUREMENTS,
    NOTHING,
    PAGE,
    RESULTS,
    main,
    markdown,
    replaced,
    stored,
)
from ddpopt.errors import UsageError

CONDITIONS = {"command": "python -m x", "processor": "A | B"}
GOOD = {
    name: Section(
        name,
        CONDITIONS,
        (at_most("gpt", "inline to one graph", 1.04, 1.05, spread=(1.0, 1.1), limit=1.0),),
        (Grid("all", ("mode", "s"), (("inline", "1.0"),)),),
    )
    for name in MEASUREMENTS
}


def as_json(section: Section) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps({**asdict(section), "figures": []}))
    return read


def store(folder: Path, sections: Mapping[str, Section]) -> None:
    for name, section in sections.items():
        (folder / f"{name}.json").write_text(json.dumps(as_json(section)))


def test_a_bound_itself_is_enough() -> None:
    assert at_most("x", "y", 1.05, 1.05).held
    assert at_least("x", "y", 4.0, 4).held
    assert not at_most("x", "y", None, 9).held


@pytest.mark.parametrize("section", [*GOOD.values(), missing("step")])
def test_a_section_survives_json(section: Section) -> None:
    assert section_of(as_json(section)) == section


def test_all_held_is_exit_code_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, GOOD)
    assert main(["--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "inline to one graph" in shown
    assert "not measured" not in shown


def test_a_measurement_that_left_no_file_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, {name: section for name, section in GOOD.items() if name != "compile"})
    assert main(["--results", str(tmp_path)]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not measured" in line)
    assert "compile" in line


def test_what_is_not_measured_anew_stays_in_the_summary_of_that_name_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, GOOD)
    assert main(["--results", str(tmp_path), "--store", "cpu"]) == 0
    (kept,) = (section for section in stored(tmp_path)["cpu"] if section.name == "step")
    (tmp_path / "step.json").unlink()
    store(tmp_path, {"planning": replace(GOOD["planning"], conditions={"date": "later"})})
    capsys.readouterr()
    assert main(["--results", str(tmp_path), "--store", "cpu"]) == 0
    assert "not measured" not in capsys.readouterr().out
    sections = {section.name: section for section in stored(tmp_path)["cpu"]}
    assert sections["step"] == kept
    assert sections["planning"].conditions == {"date": "later"}
    assert main(["--results", str(tmp_path), "--store", "another"]) == 1


def test_a_file_of_something_else_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.json").write_text("{}")
    assert main(["--results", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "expected what `python -m benchmarks.step --json` writes, got KeyError: 'name'" in said


def test_a_page_gets_the_tables_of_all_stored_summaries_and_keeps_the_rest(tmp_path: Path) -> None:
    store(tmp_path, GOOD)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nfigures of before\n{END}\nafter\n")
    main(["--results", str(tmp_path), "--store", "cpu", "--markdown", str(page)])
    first = page.read_text()
    assert first.startswith(f"before\n{BEGIN}\n\n## Figures: cpu\n\n### planning\n")
    assert first.endswith(f"\n{END}\nafter\n")
    assert "figures of before" not in first
    assert r"processor: A \| B" in first
    main(["--results", str(tmp_path), "--store", "a-gpu", "--markdown", str(page)])
    assert "## Figures: a-gpu" in page.read_text()
    assert "## Figures: cpu" in page.read_text()


def test_figures_are_written_with_three_digits_and_counts_without() -> None:
    claims = (
        Claim("a", "ratio", 1.0499, (1.01, 1.2), 1.0, "at most 1.05", held=True),
        Claim("b", "count", 51007, None, None, "at least 50000", held=False),
        at_most("c", "ratio", None, 1.05),
    )
    lines = markdown({"cpu": [Section("step", {}, claims, ())]}).splitlines()
    assert lines[-3:] == [
        "| a | ratio | 1.050 | 1.010 – 1.200 | 1.000 | at most 1.05 | yes |",
        "| b | count | 51007 | – | – | at least 50000 | no |",
        "| c | ratio | – | – | – | at most 1.05 | not measured |",
    ]


def test_without_a_stored_summary_the_page_says_so() -> None:
    assert markdown({}) == NOTHING


@pytest.mark.parametrize("page", ["nothing\n", f"{BEGIN}\n", f"{END}\n{BEGIN}\n"])
def test_a_page_without_markers_is_left_alone(page: str) -> None:
    with pytest.raises(UsageError, match="expected a line '<!-- begin"):
        replaced(page, "x")


def test_the_figures_of_the_documentation_are_those_of_the_stored_summaries() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == replaced(page, markdown(stored(RESULTS)))


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_the_documentation_names_each_measurement_and_its_command(name: str) -> None:
    assert f"| {name} | `python -m benchmarks.{name}` |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_documentation_names_each_workload(name: str) -> None:
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")
