"""Verdicts: when they are true, what they exit with, what they raise, and that JSON keeps all of them."""

import json
import math
from dataclasses import replace

import pytest

from ddpopt.errors import InfrastructureError, VerificationError
from ddpopt.judge.verdict import Measured, Trial, Verdict
from tests.support.refusals import refusal
from tests.support.verdicts import all_kinds, broken_trial, impossible_trial, ok_trial, verdict, wrong_trial


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
def test_a_verdict_is_true_if_something_was_judged_right(trials: tuple[Trial, ...], exit_code: int) -> None:
    made = verdict(*trials)
    assert (made.exit_code, bool(made)) == (exit_code, exit_code == 0)
    raised = 0
    try:
        made.require()
    except (VerificationError, InfrastructureError) as error:
        raised = error.exit_code
    assert raised == exit_code


def not_finite() -> Verdict:
    """Numbers that JSON does not have."""
    finding = replace(wrong_trial().findings[0], ulps=math.inf, error=math.nan)
    seen = Measured("layers.0.weight", "L0", 0, math.inf, 1.0, -math.inf, 0, 0)
    return verdict(replace(wrong_trial(), findings=(finding,), measured=(seen,)))


@pytest.mark.parametrize("made", [all_kinds(), verdict(), verdict(ok_trial()), not_finite()])
def test_a_verdict_is_strict_json_with_every_trial_and_says_whether_it_is_right(made: Verdict) -> None:
    def refuse(word: str) -> float:
        raise ValueError(f"{word} is no JSON")

    data = json.loads(made.to_json(), parse_constant=refuse)
    assert data["right"] is bool(made)
    errors = [[str(float(found["error"] or 0)) for found in trial["findings"]] for trial in data["trials"]]
    assert errors == [[str(float(found.error or 0)) for found in trial.findings] for trial in made.trials]


def test_requiring_a_wrong_verdict_raises_every_finding_and_every_reason_at_once() -> None:
    made = all_kinds()
    text = refusal(made.require, VerificationError)
    lines = [f"    - {finding.level} {finding.message}" for finding in made.findings]
    lines += [f"  {t.name}: {t.status}: {t.reason}" for t in made.trials if t.reason]
    assert text.startswith("pkg.module:model on 2 ranks: 2 finding(s)\n")
    assert [line for line in lines if line not in text] == []
    assert len(lines) == 4
