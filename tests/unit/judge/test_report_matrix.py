"""The grids of a verdict: every trial has its place, and reasons that are alike are one reason."""

from collections import Counter
from dataclasses import replace

from ddpopt.judge.report.matrix import overview
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


def test_every_trial_has_a_place_and_if_it_is_not_ok_one_reason_and_its_mark() -> None:
    made = matrix()
    view = overview(made)
    rows = [row for grid in view.grids.values() for row in grid.values()]
    assert Counter(id(trial) for row in rows for trial in row.values()) == Counter(map(id, made.trials))
    assert len(view.marks()) == sum(len(reason.trials) for reason in view.reasons)
    not_ok = {id(trial) for trial in made.trials if trial.status is not Status.OK}
    assert set(view.marks()) == not_ok


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
    assert (view.down, [len(rows) for rows in view.grids.values()]) == ("case", [len(CASES)])
    many = overview(matrix(MODES, 3, CASES))
    assert (many.down, [*many.grids]) == ("option", [f"case {name}" for name in CASES])


def test_each_backend_of_a_mode_is_a_column() -> None:
    made = verdict(ok_trial(), replace(ok_trial(), backend="inductor"), ok_trial(option="join"))
    view = overview(made)
    assert view.columns == ("ddpopt-inline, aot_eager", "ddpopt-inline, inductor")
    (rows,) = view.grids.values()
    assert [[*row] for row in rows.values()] == [[*view.columns], [view.columns[0]]]
