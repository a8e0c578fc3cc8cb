"""Tests of `benchmarks.summary`: what was asked and whether it held."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planning_rows
from benchmarks.alignment_rows import Cell, Row
from benchmarks.compile_once import Start
from benchmarks.network import Network
from benchmarks.planning_rows import OURS, THEIRS, Timing
from benchmarks.step import Measured
from benchmarks.step_workloads import WORKLOADS
from benchmarks.summary import PAGE, RESULTS, claim_cells, main, stored
from benchmarks.summary_readers import (
    RATES,
    READERS,
    read_alignment,
    read_compile,
    read_planning,
    read_step,
)
from benchmarks.summary_sections import Claim, Section, at_least, at_most, sections_of
from tests.unit.step_figures import figures

CONDITIONS = {"command": "python -m x", "processor": "A | B"}
SLOW = Network("a slow link", ("a", "b"), ((), ()), emulated=True)


def planning(
    ours: Mapping[int, tuple[float, ...]], theirs: Mapping[int, tuple[float, ...]]
) -> dict[str, Any]:
    timings = {
        name: [Timing(layers, 30 * layers, layers + 2, seconds) for layers, seconds in found.items()]
        for name, found in ((OURS, ours), (THEIRS, theirs))
    }
    found = {name: [asdict(timing) for timing in each] for name, each in timings.items()}
    verdict = asdict(planning_rows.judge(timings))
    return as_json({"conditions": CONDITIONS, "timings": found, "verdict": verdict})


def compiled(cold_s: Mapping[tuple[str, int, str], tuple[float, ...]], anew: int = 0) -> dict[str, Any]:
    starts = [
        {
            "model": model,
            "layers": layers,
            "mode": mode,
            "uncached": [asdict(Start(cpu_s, cpu_s, 4, 0)) for cpu_s in seconds],
            "cold": [asdict(Start(cpu_s, cpu_s, 4, 0)) for cpu_s in seconds],
            "warm": [asdict(Start(1.0, 1.0, anew, 4))],
        }
        for (model, layers, mode), seconds in cold_s.items()
    ]
    return as_json({"conditions": CONDITIONS, "starts": starts, "problems": []})


def stepped(*, emulated: bool = True) -> dict[str, Any]:
    tables = []
    for rate in RATES:
        for model in WORKLOADS:
            found = replace(
                figures(torch=[26.0, 28.0], inline=[13.0, 14.0]), model=model, graphs={"torch": 1}
            )
            tables.append(Measured(rate, replace(SLOW, emulated=emulated), found).document())
    return as_json({"conditions": CONDITIONS, "tables": tables})


def aligned(**ratios: list[float]) -> dict[str, Any]:
    rows = [
        asdict(Row("gpt", "1", 0.5, "", 10, {mode: Cell(found[index]) for mode, found in ratios.items()}))
        for index in range(len(next(iter(ratios.values()))))
    ]
    return as_json({"conditions": CONDITIONS, "rows": rows})


def as_json(document: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(document))
    return read


GOOD = {
    "planning": planning(
        {100: (1.0, 1.1), 200: (2.0, 2.0), 1700: (17.0, 18.0)}, {100: (30.0,) * 2, 200: (50.0, 60.0)}
    ),
    "compile": compiled(
        {
            (model, layers, mode): (seconds,)
            for model in ("gpt", "resnet")
            for layers in (24, 48)
            for mode, seconds in (("whole", 50.0), ("torch", 99.0), ("split", 20.0), ("inline", 51.0))
        }
    ),
    "step": stepped(),
    "alignment": aligned(torch=[0.0, 0.5], split=[0.99, 1.1], inline=[1.0, 1.0]),
}


def held(section: Section) -> dict[str, bool]:
    return {f"{claim.case}: {claim.what}": claim.held for claim in section.claims}


def store(folder: Path, documents: Mapping[str, Any]) -> None:
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", READERS)
def test_where_all_is_as_asked_every_claim_holds(name: str) -> None:
    assert set(held(READERS[name](GOOD[name])).values()) == {True}


def test_planning_has_the_ratio_of_each_round_as_spread_and_linear_growth_as_its_limit() -> None:
    ratio, growth, *_ = read_planning(GOOD["planning"]).claims
    assert (ratio.found, ratio.spread, ratio.asked) == (27.5, (25.0, 30.0), "at least 20")
    assert (growth.case, growth.limit) == ("100 to 1700 layers", 1.0)


def test_planning_has_to_go_to_fifty_thousand_nodes_and_compare_at_two_hundred_layers() -> None:
    section = read_planning(planning({100: (1.0,), 400: (4.0,)}, {100: (99.0,)}))
    assert list(held(section).values()) == [False, True, False, True]
    assert section.claims[0].remark == "not measured"
    assert section.grids[0].rows[-1] == ("400", "12000", "4.000 (4.000 – 4.000)", "–", "–")


def test_a_compile_that_is_too_dear_does_not_hold() -> None:
    found = {("gpt", 24, mode): (cost,) for mode, cost in (("whole", 50.0), ("torch", 79.0), ("split", 20.0))}
    section = read_compile(
        compiled({**found, ("gpt", 24, "inline"): (53.0,), ("gpt", 48, "split"): (26.0,)}, 1)
    )
    gpt = {claim: kept for claim, kept in held(section).items() if claim.startswith("gpt")}
    cases = (
        "gpt, 24 layers: torch's {} start to split's",
        "gpt, 24 layers: inline's {} start to one graph's",
        "gpt, 48 layers: inline's {} start to one graph's",  # not measured
        "gpt, 24 to 48 layers: growth of split's {} start",
    )
    anew = (f"gpt, all depths: {mode}: compiled in a warm start" for mode in ("split", "inline"))
    assert gpt == dict.fromkeys((*anew, *(c.format(k) for c in cases for k in ("uncached", "cold"))), False)


def test_a_model_that_was_not_compiled_is_not_measured() -> None:
    section = read_compile(compiled({("gpt", 24, "split"): (1.0,)}))
    resnet = [claim for claim in section.claims if claim.case.startswith("resnet")]
    assert {claim.remark for claim in resnet} == {"not measured"}


def test_the_spread_of_a_compile_is_over_its_rounds() -> None:
    found = {("gpt", 24, "torch"): (80.0, 90.0), ("gpt", 24, "split"): (20.0, 15.0)}
    claim = read_compile(compiled(found)).claims[0]
    assert (claim.found, claim.spread) == (5.0, (4.0, 6.0))


def test_a_step_that_is_not_measured_over_a_slow_network_does_not_hold() -> None:
    kept = held(read_step(stepped(emulated=False)))
    assert len(kept) == len(RATES) * len(WORKLOADS)
    assert not any(kept.values())


def test_a_step_has_three_claims_and_a_row_for_each_mode() -> None:
    section = read_step(GOOD["step"])
    first = [claim for claim in section.claims if claim.case == "linears at 1gbit"]
    assert [(claim.what, claim.found, claim.limit) for claim in first] == [
        ("inline to the limit", 1.0, 1.0),
        ("inline to the best other", 0.5, 0.5),
        ("torch's, one graph, to inline", 2.0, 2.0),
    ]
    torchs, inline = section.grids[0].rows
    assert torchs[:2] == ("torch (graphs: 1)", "26000")
    assert inline[3:] == ("1.000", "25 %", "2.0", "–")


def test_one_run_with_too_little_overlap_is_enough_to_fail() -> None:
    kept = held(read_alignment(aligned(split=[1.0, 0.97], inline=[1.0, 1.0])))
    assert list(kept.values()) == [False, True, True, True]


def test_a_mode_that_no_run_had_is_not_measured() -> None:
    section = read_alignment(aligned(inline=[1.0]))
    assert [claim.remark for claim in section.claims] == ["not measured", "not measured", "", ""]


def test_a_bound_itself_is_enough() -> None:
    assert at_most("x", "y", 1.05, 1.05).held
    assert at_least("x", "y", 4.0, 4).held
    assert not at_most("x", "y", None, 9).held


def test_sections_survive_json() -> None:
    sections = tuple(reader(GOOD[name]) for name, reader in READERS.items())
    assert sections_of(as_json({"all": [asdict(section) for section in sections]})["all"]) == sections


def test_all_held_is_exit_code_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, GOOD)
    assert main(["--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "torch's, one graph, to inline" in shown
    assert "not measured" not in shown


def test_a_measurement_that_left_no_file_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, {name: document for name, document in GOOD.items() if name != "compile"})
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
    store(tmp_path, {"planning": {**GOOD["planning"], "conditions": {"date": "later"}}})
    capsys.readouterr()
    assert main(["--results", str(tmp_path), "--store", "cpu"]) == 0
    assert "not measured" not in capsys.readouterr().out
    sections = {section.name: section for section in stored(tmp_path)["cpu"]}
    assert sections["step"] == kept
    assert sections["planning"].conditions == {"date": "later"}
    assert main(["--results", str(tmp_path), "--store", "another"]) == 1


def test_a_file_of_something_else_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, {"step": {"conditions": {}}})
    assert main(["--results", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "expected what `python -m benchmarks.step --json` writes, got KeyError: 'tables'" in said


def test_figures_are_written_with_three_digits_and_counts_without() -> None:
    cells = [
        claim_cells(Claim("a", "ratio", 1.0499, (1.01, 1.2), 1.0, "at most 1.05", held=True)),
        claim_cells(Claim("b", "count", 51007, None, None, "at least 50000", held=False)),
        claim_cells(at_most("c", "ratio", None, 1.05)),
    ]
    assert [" | ".join(row) for row in cells] == [
        "a | ratio | 1.050 | 1.010 – 1.200 | 1.000 | at most 1.05 | yes",
        "b | count | 51007 | – | – | at least 50000 | no",
        "c | ratio | – | – | – | at most 1.05 | not measured",
    ]


def test_each_fraction_in_the_tables_of_the_documentation_is_a_stored_figure() -> None:
    sections = [section for name in stored(RESULTS) for section in stored(RESULTS)[name]]
    cells = [cell for section in sections for claim in section.claims for cell in claim_cells(claim)]
    cells += [cell for section in sections for grid in section.grids for row in grid.rows for cell in row]
    known = {number for cell in cells for number in re.findall(r"\d+\.\d+", cell)}
    results = PAGE.read_text(encoding="utf-8").partition("# Results")[2]
    rows = [line for line in results.splitlines() if line.startswith("|") and "at least" not in line]
    shown = {number for row in rows for number in re.findall(r"\d+\.\d+", row)}
    assert shown
    assert shown - known == set()


@pytest.mark.parametrize("name", READERS)
def test_the_documentation_names_each_measurement_and_its_command(name: str) -> None:
    assert f"| {name} | `python -m benchmarks.{name}` |" in PAGE.read_text(encoding="utf-8")
