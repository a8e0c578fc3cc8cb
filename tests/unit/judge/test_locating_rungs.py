"""ddpopt.judge.locating.rungs: which disagreement of a stage may be what was found."""

from dataclasses import replace

import pytest

from ddpopt.judge.locating.rungs import Question, Stage, Symptom

NUMBERS = Question("x", "default", "ddpopt-inline", "aot_eager", structural=False)
BELOW = Stage("whole", "aot_eager")
OWN = Stage("ddpopt-inline", "aot_eager")
STRUCTURE = Symptom("structure")


def test_a_stage_below_that_compiles_nothing_is_not_why_numbers_are_wrong() -> None:
    assert not NUMBERS.is_shown_by(BELOW, STRUCTURE)
    assert NUMBERS.is_shown_by(BELOW, Symptom("numbers"))
    assert NUMBERS.is_shown_by(BELOW, Symptom("died", "SIGSEGV"))


def test_where_structure_is_what_was_found_it_counts_below_too() -> None:
    assert replace(NUMBERS, structural=True).is_shown_by(BELOW, STRUCTURE)


def test_whatever_the_trials_own_stage_shows_counts() -> None:
    assert NUMBERS.is_shown_by(OWN, STRUCTURE)


@pytest.mark.parametrize("stage", [BELOW, OWN])
def test_a_stage_that_agrees_shows_nothing(stage: Stage) -> None:
    assert not NUMBERS.is_shown_by(stage, None)
