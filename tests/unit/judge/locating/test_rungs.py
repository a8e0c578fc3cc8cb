"""ddpopt.judge.locating.rungs: which disagreement of a stage may be what was found."""

from dataclasses import replace

import pytest

from ddpopt.judge.locating.rungs import Question, Stage, Symptom, rung_of
from ddpopt.judge.verdict import Status, Trial

NUMBERS = Question("x", "default", "ddpopt-inline", "aot_eager", structural=False)
BELOW = Stage("whole", "aot_eager")
OWN = Stage("ddpopt-inline", "aot_eager")
STRUCTURE = Symptom("structure")


@pytest.mark.parametrize(
    ("stage", "symptom", "structural", "shown"),
    [
        (BELOW, STRUCTURE, False, False),  # no reason for wrong numbers
        (BELOW, STRUCTURE, True, True),
        (BELOW, Symptom("numbers"), False, True),
        (OWN, STRUCTURE, False, True),
        (OWN, None, False, False),
    ],
)
def test_below_the_trials_own_stage_structure_counts_only_where_it_is_what_was_found(
    stage: Stage, symptom: Symptom | None, structural: bool, shown: bool
) -> None:
    assert replace(NUMBERS, structural=structural).is_shown_by(stage, symptom) is shown


@pytest.mark.parametrize("status", Status)
def test_a_rung_agrees_only_if_it_was_judged_right(status: Status) -> None:
    rung = rung_of(BELOW, Trial("x", "whole", "default", "aot_eager", status, reason="why"))
    assert rung.agrees is {Status.OK: True, Status.WRONG: False}.get(status)
