"""What counts as a change, and what the gate says of it."""

import pytest

from ddpopt.gate.baseline import Figures
from ddpopt.gate.comparison import Change, changes
from ddpopt.gate.figures import failures
from ddpopt.judge.verdict import Status
from tests.support.gate_figures import CASE, FIGURES, MODE, PLAN, comparison

GRAPH = Change("gpt", "ddpopt-inline", "graphs", "1", "2")


def test_every_figure_is_compared() -> None:
    for place, figures in CASE.items():
        for name in figures:
            other = {**CASE, place: {**figures, name: "another"}}
            (change,) = changes(FIGURES, {**FIGURES, "gpt": other})
            assert (change.place, change.figure, change.now) == (place, name, "another")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (
            {**FIGURES, "gpt": {**CASE, "plan": {**PLAN, "bucket 0": ["0.002 MiB float32", "c", "b"]}}},
            [
                (
                    "gpt",
                    "plan",
                    "bucket 0: 0.002 MiB float32, b, c before, 0.002 MiB float32, c, b now (only the order "
                    "inside the bucket)",
                )
            ],
        ),
        ({"gpt": CASE}, [("tied", "", "case: present before, missing now")]),
        ({**FIGURES, "new": CASE}, [("new", "", "case: absent before, present now")]),
        ({**FIGURES, "gpt": {"plan": PLAN}}, [("gpt", "ddpopt-inline", "mode: present before, missing now")]),
    ],
)
def test_a_change_says_from_what_to_what(now: Figures, said: list[tuple[str, str, str]]) -> None:
    assert [(change.case, change.place, str(change)) for change in changes(FIGURES, now)] == said


def test_what_failed_is_not_for_a_baseline() -> None:
    assert failures(CASE) == []
    told = failures({"plan": {"failure": "no"}, "m": {"verdict": "wrong: L0"}})
    assert told == ["plan: failure: no", "m: verdict: wrong: L0"]
    assert len(failures({"m": {**MODE, "overlap, as a share of eager DDP's": "KeyError: a"}})) == 1


def test_the_verdict_for_reports_has_a_trial_for_each_plan_and_mode() -> None:
    found = comparison(GRAPH, Change("gone", "", "case", "there", "missing")).as_verdict()
    assert {(trial.case, trial.mode): trial.status for trial in found.trials} == {
        ("gpt", "ddpopt-inline"): Status.WRONG,
        ("gone", "case"): Status.WRONG,
        ("gpt", "plan"): Status.OK,
        ("tied", "plan"): Status.OK,
        ("tied", "ddpopt-inline"): Status.OK,
    }
    assert next(finding.message for finding in found.findings) == "graphs: 1 before, 2 now"
