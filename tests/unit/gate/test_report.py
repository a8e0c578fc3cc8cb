"""What the gate says, in a terminal and on GitHub; and what counts as a change."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from ddpopt.gate.bands import Bands
from ddpopt.gate.changes import changes
from ddpopt.gate.figures import Figures, ModeFigures, Ratio
from ddpopt.gate.github import gate_annotations, gate_summary, write_gate_github
from ddpopt.gate.measuring import Measured, Problem
from ddpopt.gate.moved import Change
from ddpopt.gate.text import gate_text, headline
from tests.unit.gate_figures import CASE, FIGURES, MODE, comparison, with_mode
from tests.unit.verdicts import folded

GRAPH = Change("gpt", "ddpopt-inline", "graphs", "1", "2")
BUCKET = Change("gpt", "plan", "bucket 1", "1.000 MiB float32, with a|b*", "none")
FEWER = Change("tests/unit", "", "tests collected", "7", "6")
BETTER = Change("gpt", "times", "planning", "0.500", "0.100 (better)", False)


def moved(now: Figures, *problems: Problem) -> list[tuple[str, str, bool]]:
    found = changes(FIGURES, Measured(now, problems), Bands())
    return [(change.place, change.what, change.grave) for change in found]


def test_the_text_says_what_moved_from_what_to_what_for_which_case() -> None:
    assert_expected_inline(
        folded(gate_text(comparison(GRAPH, BUCKET, FEWER, BETTER))),
        """\
MOVED: 3 changes, 1 remark; 2 cases, 1 of them timed, 7 tests collected against
  ci/baseline.json (torch 2.13)

gpt, ddpopt-inline
  graphs: 1 before, 2 now

gpt, plan
  bucket 1: 1.000 MiB float32, with a|b* before, none now

tests/unit
  tests collected: 7 before, 6 now

gpt, times
  remark: planning: 0.500 before, 0.100 (better) now

If that is meant, put it into the baseline, where a reviewer sees it: ddpopt
  gate --baseline ci/baseline.json --update""",
    )


def test_the_text_of_a_run_in_which_nothing_moved() -> None:
    assert_expected_inline(
        gate_text(comparison()),
        """\
UNCHANGED: nothing moved; 2 cases, 1 of them timed, 7 tests collected against
  ci/baseline.json (torch 2.13)""",
    )


def test_a_remark_alone_passes() -> None:
    found = comparison(BETTER, left_out=("tied", "tests/unit"))
    assert found.exit_code == 0
    assert_expected_inline(
        gate_text(found),
        """\
UNCHANGED: 1 remark; 2 cases, 1 of them timed, 7 tests collected against
  ci/baseline.json (torch 2.13)

gpt, times
  remark: planning: 0.500 before, 0.100 (better) now
Not compared, for --only left it out: tied, tests/unit""",
    )


def test_a_comparison_of_no_case_never_passes() -> None:
    nothing = replace(comparison(), figures=Figures())
    assert nothing.exit_code == 1
    assert headline(nothing) == "MOVED: 0 changes; 0 cases against ci/baseline.json (torch 2.13)"


def test_each_change_is_an_annotation() -> None:
    assert_expected_inline(
        "\n".join(gate_annotations(comparison(GRAPH, BUCKET, FEWER, BETTER))),
        """\
::error title=ddpopt gate%3A gpt%2C ddpopt-inline::graphs: 1 before, 2 now
::error title=ddpopt gate%3A gpt%2C plan::bucket 1: 1.000 MiB float32, with a|b* before, none now
::error title=ddpopt gate%3A tests/unit::tests collected: 7 before, 6 now""",
    )


def test_nothing_is_annotated_where_nothing_grave_moved() -> None:
    assert gate_annotations(comparison(BETTER)) == []


def test_many_changes_are_annotated_place_by_place() -> None:
    many = [replace(GRAPH, what=what) for what in ("graphs", "recompiles")] * 4
    lines = gate_annotations(comparison(*many, BUCKET, BUCKET, FEWER))
    assert len(lines) == 3
    assert lines[0].startswith(
        "::error title=ddpopt gate%3A gpt%2C ddpopt-inline::graphs: 1 before, 2 now%0A"
    )


def test_github_shows_ten_annotations_so_the_last_one_counts_the_rest() -> None:
    lines = gate_annotations(comparison(*(replace(GRAPH, subject=f"case {n}") for n in range(12))))
    assert len(lines) == 10
    assert lines[-1] == "::error title=ddpopt gate::and 3 more, in the summary of this step"


def test_the_summary_has_every_change_as_a_row() -> None:
    assert_expected_inline(
        folded(gate_summary(comparison(GRAPH, BUCKET, BETTER, left_out=("tied",)))),
        """\
## :x: ddpopt gate: Moved

2 cases, 1 of them timed, 7 tests collected against ci/baseline.json (torch 2.13).

### Changes

| where | what | before | now |
| --- | --- | --- | --- |
| gpt, ddpopt-inline | graphs | 1 | 2 |
| gpt, plan | bucket 1 | 1.000 MiB float32, with a\\|b\\* | none |

### Remarks

| where | what | before | now |
| --- | --- | --- | --- |
| gpt, times | planning | 0.500 | 0.100 (better) |

Not compared, for --only left it out: tied.

If that is meant, put it into the baseline, where a reviewer sees it: ddpopt gate --baseline
    ci/baseline.json --update
""",
    )


def test_the_summary_is_appended_where_github_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    found = comparison(GRAPH)
    write_gate_github(found)
    assert file.read_text() == f"before\n{gate_summary(found)}"
    assert capsys.readouterr().out == "".join(f"{line}\n" for line in gate_annotations(found))


def test_the_json_has_what_moved_and_all_that_was_measured() -> None:
    data = json.loads(comparison(GRAPH).to_json())
    assert (data["passes"], data["torch"], len(data["changes"])) == (False, "torch 2.13", 1)
    assert data["figures"]["cases"]["gpt"]["modes"]["ddpopt-inline"]["graphs"] == 1


def test_figures_without_a_bound_are_written_as_words_and_read_back() -> None:
    endless = with_mode(replace(MODE, margins={"L0": float("inf")}))
    data = json.loads(json.dumps(endless.to_data(), allow_nan=False))
    assert Figures.from_data(data, endless.tests) == endless


# ------------------------------------------------------------------------------------------- what is a change


def test_equal_figures_are_no_change() -> None:
    assert moved(FIGURES) == []


@pytest.mark.parametrize(
    ("mode", "what", "grave"),
    [
        (replace(MODE, graphs=2), "graphs", True),
        (replace(MODE, graphs=0), "graphs", True),
        (replace(MODE, recompiles=1), "recompiles", True),
        (replace(MODE, compiled=2), "compiled by the backend", True),
        (replace(MODE, backward={"allreduce": 3}), "collectives of a backward", True),
        (replace(MODE, outside={"broadcast": 1}), "collectives outside of backwards", True),
        (replace(MODE, aligned=False), "planned = observed buckets", True),
        (replace(MODE, potential=0.97), "overlap potential", True),
        (replace(MODE, potential=1.03), "overlap potential", False),
        (
            replace(MODE, margins={"L0": 0.0, "L1": 0.61}),
            "worst distance at L1, as a share of its bound",
            True,
        ),
        (
            replace(MODE, margins={"L0": 0.0, "L1": 0.1}),
            "worst distance at L1, as a share of its bound",
            False,
        ),
        (replace(MODE, margins={"L0": 0.0}), "worst distance at L1, as a share of its bound", True),
    ],
)
def test_each_figure_of_a_mode_is_compared(mode: ModeFigures, what: str, grave: bool) -> None:
    assert moved(with_mode(mode)) == [("gpt, ddpopt-inline", what, grave)]


def test_every_figure_of_a_mode_has_a_test_above() -> None:
    assert set(ModeFigures.__dataclass_fields__) == {
        "graphs", "recompiles", "compiled", "backward", "outside", "aligned", "potential", "margins",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "found"),
    [
        (0.81, [("gpt, times", "planning, as a share of torch's time", True)]),
        (0.79, []),
        (0.30, [("gpt, times", "planning, as a share of torch's time", False)]),
        ("torch fails: KeyError", [("gpt, times", "planning, as a share of torch's time", True)]),
    ],
)
def test_a_ratio_has_a_band_on_both_sides(ratio: Ratio, found: list[tuple[str, str, bool]]) -> None:
    assert moved(replace(FIGURES, ratios={"gpt": {"planning": ratio, "compile, x": 1.0}})) == found


def test_what_is_missing_fails() -> None:
    left = replace(FIGURES, cases={"gpt": CASE}, ratios={"gpt": {"planning": 0.5}}, tests={})
    assert moved(left) == [
        ("tied", "case", True),
        ("gpt, times", "compile, x, as a share of torch's time", True),
        ("tests", "tests collected", True),
    ]


def test_what_is_new_fails_until_it_is_in_the_baseline() -> None:
    more = replace(FIGURES, cases={**FIGURES.cases, "new": CASE}, tests={"tests": 7, "other": 1})
    assert moved(more) == [("new", "case", True), ("other", "tests collected", True)]


def test_more_tests_are_a_remark() -> None:
    assert moved(replace(FIGURES, tests={"tests": 8})) == [("tests", "tests collected", False)]


def test_a_problem_fails_and_what_it_kept_from_being_measured_is_not_told_twice() -> None:
    left = replace(
        FIGURES,
        cases={"gpt": replace(CASE, modes={}), "tied": CASE},
        ratios={"gpt": {"planning": 0.5}},
        tests={},
    )
    problems = [
        Problem("gpt", "ddpopt-inline", "x"),
        Problem("gpt", "compile, x", "y"),
        Problem("tests", "", "z"),
    ]
    assert moved(left, *problems) == [
        ("gpt, ddpopt-inline", "check", True),
        ("gpt, compile, x", "check", True),
        ("tests", "check", True),
    ]
