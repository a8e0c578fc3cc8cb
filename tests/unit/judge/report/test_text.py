"""The text of a verdict: in full for one trial, as grids for many, and the verdict last."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from ddpopt.judge.locating.scripting import shows
from ddpopt.judge.report.text import AT_MOST, LINES, verdict_text
from ddpopt.judge.report.wording import headline, outcome, worst_first
from ddpopt.judge.verdict import Location, Measured, Verdict
from ddpopt.terminal.tables import WIDTH
from tests.support.verdicts import EVERY, all_kinds, broken_trial, location, ok_trial, verdict, wrong_trial


def test_one_wrong_trial_says_what_and_where() -> None:
    assert_expected_inline(
        verdict_text(verdict(wrong_trial(), location=location())),
        """\
torch 2.13.0; ddpopt 0.1.0; python 3.11.2; device cpu; platform Linux

pkg.module:model: ddpopt-split / default, aot_eager: wrong; judged by L3
  structure, L0 bitwise, L1 communication bound; 1 graph compiled; 1.2 s

L0 bitwise does not hold: an aot_eager gradient equals eager's in every bit.
L3 structure does not hold: every planned bucket is reduced exactly once per
  backward.
  - L0: layers.0.weight: expected eager's gradient, got one that is 512 ULPs
    away at [3, 4] (bucket 1, rank 1, step 2)
  - L3: bucket 1 was reduced 2 times in step 2 of rank 0, expected 1

level  parameters  the worst of them  ULPs  error  bound
--------------------------------------------------------
L0              4  layers.0.weight     512  3e-05      0
                     rank 1, step 2
L1              4  layers.0.bias         1  1e-08  4e-08
                     rank 1, step 2

bucket    MiB  dtype    error/bound  gradients
-------------------------------------------------------------------
     0  4.000  float32         0.25  layers.1.weight, layers.1.bias
     1  1.000  float32          inf  layers.0.weight, layers.0.bias

notes
  - L2 needs Inductor, so it was not applied

where it goes wrong
tried              result      seen
--------------------------------------------------------
eager, DDP         not judged  refused: no such option
aot_eager, no DDP  agrees
aot_eager, DDP     DIFFERS     layers.0.weight, 512 ULPs
The lowest layer that is wrong: what ddpopt does around the compiled code.
The smallest set of compiled segments that shows it:
  - graph 0, segment 1: linear, relu
Script: repro_linears.py (run in a fresh interpreter, it shows the difference)

WRONG: pkg.module:model on 2 ranks: 2 findings; 1 trial: 1 wrong""",
    )


def test_trials_of_every_kind() -> None:
    text = verdict_text(replace(all_kinds(), location=None))
    _, grids, wrong, broken, impossible, *_ = re.split("\n\n(?=   mode|W1: |B1: |n1: |notes)", text)
    assert "\n  - pkg.module:model: ddpopt-split / default, aot_eager: L0: layers.0.weight:" in wrong
    assert_expected_inline(
        "\n\n".join([grids, broken, impossible]),
        """\
   mode                      ok  wrong  refused  not possible  broken
---------------------------------------------------------------------
a  ddpopt-inline, aot_eager   1      -        -             -       -
b  ddpopt-split, aot_eager    -      1        -             -       -
c  torch, aot_eager           -      -        -             -       1
d  eager                      -      -        -             1       -

case pkg.module:model
option    a   b   c   d
-----------------------
default  ok  W1  B1   .
mixed     .   .   .  n1

W wrong, B broken, r refused, n not possible, with the number of the reason
  below; . did not run

B1: broken, 1 trial
  rank 1 died with signal 9
  File "model.py", line 7, in forward
    return self.layer(x)

n1: not possible, 1 trial
  eager itself cannot: RuntimeError: cpu backend doesn't support events""",
    )


@pytest.mark.parametrize("made", EVERY)
def test_every_line_fits_and_the_last_paragraph_is_the_verdict(made: Verdict) -> None:
    text = verdict_text(made)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.isascii()
    assert " ".join(text.split("\n\n")[-1].split()) == headline(made)
    equal = any(each.ulps == each.error == 0 for trial in made.trials for each in trial.measured)
    assert ("all equal, bit for bit" in text) == (equal and made.trials == (ok_trial(),))


def test_lines_of_a_reason_and_findings_that_are_left_out_are_counted() -> None:
    reason = "\n".join(f"line {index}" for index in range(LINES + 7))
    text = verdict_text(verdict(replace(broken_trial(), reason=reason)))
    assert f"line {LINES}\n  ... 6 more lines, all in the JSON" in text
    many = replace(wrong_trial(), findings=wrong_trial().findings[:1] * 30, notes=tuple(map(str, range(10))))
    for made in (verdict(many), verdict(many, ok_trial())):
        assert f"and {30 - AT_MOST} more findings, all in the JSON" in verdict_text(made)
    assert "and 2 more notes, all in the JSON" in verdict_text(verdict(many))


def test_the_worst_error_is_the_one_that_takes_most_of_its_bound() -> None:
    nan = float("nan")
    errors: list[tuple[str, float, float, float]]
    errors = [("near", 9, 10, 1), ("far", 1, 10, 1), ("equal", 0, 0, 0), ("missed", 1e-30, 0, 1)]
    errors += [("nan", nan, 1, 1), ("b", 9, 10, 1), ("c", 9, 10, nan)]
    entries = [Measured(name, "L1", None, ulps, error, bound, 0, 0) for name, error, bound, ulps in errors]
    names = [entry.parameter for entry in worst_first(entries)]
    assert names == ["missed", "nan", "c", "b", "near", "far", "equal"]


def test_a_script_whose_run_did_not_end_is_not_said_to_show_nothing(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(30)")
    assert shows(script, 1, 0.5) is None
    location = Location((), "the backend", script="slow.py", reproduces=None)
    assert outcome(location) == "its run in a fresh interpreter did not end in the time that was left"
