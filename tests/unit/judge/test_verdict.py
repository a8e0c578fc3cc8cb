"""Verdicts: when they are true, what they exit with, what they raise, and that JSON keeps all of them."""

import json
import math
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from ddpopt.errors import InfrastructureError, VerificationError
from ddpopt.judge.verdict import Measured, Trial, Verdict
from tests.unit.verdicts import (
    all_kinds,
    broken_trial,
    folded,
    impossible_trial,
    ok_trial,
    verdict,
    wrong_trial,
)


@pytest.mark.parametrize(
    ("trials", "exit_code"),
    [
        pytest.param((ok_trial(),), 0, id="right"),
        pytest.param((ok_trial(), impossible_trial()), 0, id="what eager cannot do is not held against it"),
        pytest.param((ok_trial(), wrong_trial()), 1, id="one wrong trial"),
        pytest.param((wrong_trial(), broken_trial()), 1, id="wrong outweighs broken"),
        pytest.param((ok_trial(), broken_trial()), 3, id="broken outweighs ok"),
        pytest.param((impossible_trial(),), 3, id="nothing was possible"),
        pytest.param((), 3, id="nothing ran"),
    ],
)
def test_a_verdict_is_true_only_if_something_was_judged_and_nothing_is_wrong(
    trials: tuple[Trial, ...], exit_code: int
) -> None:
    made = verdict(*trials)
    assert (made.exit_code, bool(made)) == (exit_code, exit_code == 0)
    raised = 0
    try:
        made.require()
    except (VerificationError, InfrastructureError) as error:
        raised = error.exit_code
    assert raised == exit_code


def test_findings_are_those_of_all_trials_in_order() -> None:
    made = verdict(wrong_trial(), ok_trial(), wrong_trial())
    assert made.findings == wrong_trial().findings * 2


@pytest.mark.parametrize("made", [all_kinds(), verdict(), verdict(ok_trial())])
def test_json_gives_an_equal_verdict_back_and_says_whether_it_is_right(made: Verdict) -> None:
    assert Verdict.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["right"] is bool(made)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_json_is_strict_and_keeps_what_is_no_finite_number(number: float) -> None:
    def refuse(word: str) -> float:
        raise ValueError(f"{word} is no JSON")

    finding = replace(wrong_trial().findings[0], ulps=number, error=number, bound=number)
    seen = Measured("layers.0.weight", "L0", 0, number, number, number, 0, 0)
    made = verdict(replace(wrong_trial(), findings=(finding,), measured=(seen,)))
    json.loads(made.to_json(), parse_constant=refuse)
    (trial,) = Verdict.from_json(made.to_json()).trials
    for one in (trial.findings[0], trial.measured[0]):
        assert [repr(value) for value in (one.ulps, one.error, one.bound)] == [repr(number)] * 3


@pytest.mark.parametrize("text", ["[]", "{}", "no JSON"])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Verdict.from_json(text)


def test_requiring_a_wrong_verdict_raises_every_finding_at_once() -> None:
    with pytest.raises(VerificationError) as caught:
        all_kinds().require()
    assert_expected_inline(
        folded(str(caught.value)),
        """\
pkg.module:model on 2 ranks: 2 finding(s)
  pkg.module:model: ddpopt-split / default, aot_eager: wrong
    - L0 layers.0.weight: expected eager's gradient, got one that is 512 ULPs away at [3, 4]
    - L3 bucket 1 was reduced 2 times in step 2 of rank 0, expected 1
  pkg.module:model: torch / default, aot_eager: broken: rank 1 died with signal 9
File "model.py", line 7, in forward
  return self.layer(x)
  pkg.module:model: eager / mixed: not possible: eager itself cannot: RuntimeError: cpu backend
    doesn't support events""",
    )
