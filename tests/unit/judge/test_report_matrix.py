"""The grids of a verdict: every trial has its place, and reasons that are alike are one reason."""

from collections import Counter
from dataclasses import replace

from ddpopt.judge.report.matrix import OK, overview
from ddpopt.judge.verdict import Status
from tests.unit.verdicts import (
    CASES,
    MODES,
    broken_trial,
    impossible_trial,
    matrix,
    ok_trial,
    verdict,
    wrong_trial,
)


def test_every_trial_has_a_place() -> None:
    made = matrix()
    cells = [cell for grid in overview(made).grids for _, row in grid.rows for cell in row]
    assert Counter(id(cell.trial) for cell in cells if cell) == Counter(map(id, made.trials))


def test_every_trial_that_is_not_ok_has_one_reason_and_its_mark() -> None:
    view = overview(matrix())
    marks = {id(trial): reason.mark for reason in view.reasons for trial in reason.trials}
    assert len(marks) == sum(len(reason.trials) for reason in view.reasons)
    for _, row in (row for grid in view.grids for row in grid.rows):
        for cell in filter(None, row):
            assert cell.mark == marks.get(id(cell.trial), OK)
            assert (cell.mark == OK) == (cell.trial.status is Status.OK)


def test_what_is_wrong_comes_first_then_what_broke_then_what_is_not_possible() -> None:
    made = verdict(impossible_trial(), broken_trial(), wrong_trial(), ok_trial())
    assert [reason.mark for reason in overview(made).reasons] == ["W1", "B1", "n1"]


def test_reasons_that_differ_in_a_number_or_an_address_are_one() -> None:
    trials = [
        replace(broken_trial(option=str(port)), reason=f"port {port} is taken, <Store at 0x7f{port:x}>")
        for port in range(29500, 29503)
    ]
    (reason,) = overview(verdict(*trials)).reasons
    assert reason.text == "port 29500 is taken, <Store at 0x7f733c>"
    assert len(reason.trials) == 3


def test_wrong_trials_are_alike_if_the_same_claims_do_not_hold() -> None:
    one, other = wrong_trial(option="one"), wrong_trial(option="other")
    less = replace(wrong_trial(option="less"), findings=wrong_trial().findings[:1])
    turned = replace(other, option="turned", findings=other.findings[::-1])
    reasons = overview(verdict(one, less, other, turned)).reasons
    assert [[trial.option for trial in reason.trials] for reason in reasons] == [
        ["one", "other", "turned"],
        ["less"],
    ]


def test_where_there_is_one_option_cases_are_the_rows_of_one_grid() -> None:
    view = overview(matrix(MODES, 1, CASES))
    assert (view.down, len(view.grids), len(view.grids[0].rows)) == ("case", 1, len(CASES))
    many = overview(matrix(MODES, 3, CASES))
    assert (many.down, [grid.title for grid in many.grids]) == ("option", [f"case {name}" for name in CASES])


def test_each_backend_of_a_mode_is_a_column() -> None:
    view = overview(verdict(ok_trial(), replace(ok_trial(), backend="inductor"), ok_trial(option="join")))
    assert view.columns == ("ddpopt-inline, aot_eager", "ddpopt-inline, inductor")
    marks = [[cell and cell.mark for cell in row] for _, row in view.grids[0].rows]
    assert marks == [["ok", "ok"], ["ok", None]]
