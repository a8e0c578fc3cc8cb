"""The grids of a verdict: every trial has its place, and reasons that are alike are one reason."""

from dataclasses import replace

from ddpopt.judge.report.matrix import overview
from tests.support.verdicts import broken_trial, verdict, wrong_trial


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
    alike = [[trial.option for trial in reason.trials] for reason in reasons]
    assert alike == [["one", "other", "turned"], ["less"]]
