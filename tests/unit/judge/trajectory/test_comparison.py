"""ddpopt.judge.trajectory.comparison: what is wrong first is named, and silence is never taken for right."""

import math

import pytest

from ddpopt.judge.training.record import LOSS, PARAMETER, STATE, NumberKind
from ddpopt.judge.trajectory.comparison import TrajectorySheet, first_wrong, measured, remarks, sheet, silence
from ddpopt.judge.trajectory.envelope import Band, Distance, Scale
from ddpopt.judge.trajectory.track import EQUAL, MISSING, ComparedNumber, KnownNumber

KINDS = {
    PARAMETER + "w": NumberKind.PARAMETER,
    STATE + "momentum of w": NumberKind.PARAMETER,
    "w": NumberKind.GRADIENT,
    LOSS: NumberKind.FORWARD,
}
STEPS = 6
NARROW = Band(size=1.0, rms=1e-6, largest=1e-6, bias=1e-6, spread=1e-7)
WIDE = Band(size=1.0, rms=2.0, largest=2.0, bias=2.0, spread=0.5)


def off(far: float) -> ComparedNumber:
    return ComparedNumber(Distance(far, far, 0.0), ulps=9.0, is_equal=False)


def compared(
    wrong: dict[tuple[int, str], ComparedNumber],
    bands: dict[tuple[int, str], Band] | None = None,
    *,
    is_exact: bool = False,
    rank: int = 0,
) -> TrajectorySheet:
    import torch

    known = {name: KnownNumber(kind, torch.float32, Scale(1.0, 0.0, 0.0)) for name, kind in KINDS.items()}
    got = [{name: wrong.get((step, name), EQUAL) for name in KINDS} for step in range(STEPS)]
    own = bands or {}
    all_bands = [{name: own.get((step, name), NARROW) for name in KINDS} for step in range(STEPS)]
    return sheet(rank, [known] * STEPS, got, all_bands, is_exact=is_exact)


@pytest.mark.parametrize("is_exact", [True, False])
def test_of_a_wrong_step_what_is_computed_first_is_named_first(is_exact: bool) -> None:
    at_3 = {(3, name): off(1e-3) for name in KINDS}
    found = compared({**at_3, (5, LOSS): off(1.0)}, is_exact=is_exact)
    order = [LOSS, "w", STATE + "momentum of w", PARAMETER + "w"]
    assert [(each.step, each.name) for each in found.wrong] == [(3, name) for name in order]


def test_the_first_step_of_all_ranks_counts() -> None:
    late, early = compared({(4, LOSS): off(1.0)}, rank=0), compared({(2, "w"): off(1.0)}, rank=1)
    (first,) = first_wrong([late, early])
    assert (first.rank, first.step, first.name) == (1, 2, "w")
    assert {each.parameter: each.step for each in measured([late, early])}["w"] == 2


def test_what_is_within_the_envelope_is_wrong_only_where_it_must_be_equal() -> None:
    inside = {(1, "w"): off(5e-7)}
    assert compared(inside).wrong == ()
    (note,) = remarks([compared(inside)], STEPS)
    far = "at most 50% into the envelope (the gradient of w, step 1)"
    assert note == f"within rounding in all of {STEPS} steps: {far}"
    (wrong,) = compared(inside, is_exact=True).wrong
    assert "it must be equal, bit for bit" in wrong.message
    assert "0.5 of what rounding explains" in wrong.message


def test_a_number_that_the_mode_lacks_later_is_wrong_and_one_that_it_never_has_is_judged_elsewhere() -> None:
    (lost,) = compared({(4, "w"): MISSING}).wrong
    assert "this run has not" in lost.message
    assert compared({(step, "w"): MISSING for step in range(STEPS)}).wrong == ()


def test_where_nothing_is_said_of_gradients_and_parameters_nothing_after_it_is_wrong_or_right() -> None:
    chaotic = {(step, name): WIDE for step in range(3, STEPS) for name in KINDS if name != LOSS}
    found = compared({(4, "w"): off(math.inf), (4, LOSS): off(1.0), (1, "w"): off(1e-7)}, chaotic)
    assert (found.silent, found.wrong) == (3, ())
    assert silence([found], STEPS).startswith(
        "steps from 3 on: nothing can be said of any gradient or parameter"
    )
    assert next(remarks([found], STEPS)).startswith("within rounding before step 3: at most 10%")
    early = compared({(2, "w"): off(1.0)}, chaotic)
    assert [each.step for each in early.wrong] == [2]


def test_one_number_that_says_nothing_is_named_and_hides_no_other() -> None:
    noise = {(step, "w"): WIDE for step in range(2, STEPS)}
    found = compared({(2, "w"): off(1.0), (3, PARAMETER + "w"): off(1.0)}, noise)
    assert (found.silent, found.hidden) == (None, {"w": 2})
    assert [each.name for each in found.wrong] == [PARAMETER + "w"]
    assert "nothing can be said of them there: w (step 2)" in [*remarks([found], STEPS)][-1]


def test_a_run_that_is_silent_from_the_start_is_not_called_equal() -> None:
    chaotic = {(step, name): WIDE for step in range(STEPS) for name in KINDS}
    found = compared({(0, "w"): off(1.0)}, chaotic)
    assert found.silent == 0
    assert [*remarks([found], STEPS)] == []


def test_equal_runs_need_no_envelope() -> None:
    import torch

    known = {name: KnownNumber(kind, torch.float32, Scale(1.0, 0.0, 0.0)) for name, kind in KINDS.items()}
    found = sheet(0, [known] * 2, [dict.fromkeys(KINDS, EQUAL)] * 2, None, is_exact=False)
    assert (found.silent, found.wrong, found.drifts) == (None, (), ())
    assert [*remarks([found], 2)] == ["equal to eager DDP, bit for bit, in all of 2 steps"]
