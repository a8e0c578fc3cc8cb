"""The text of a verdict: in full for one trial, as grids for many, and the verdict last."""

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from ddpopt.explanation.tables import WIDTH
from ddpopt.judge.report.text import AT_MOST, LINES, verdict_text
from ddpopt.judge.report.wording import headline, sentence, share, worst_first
from ddpopt.judge.verdict import Finding, Measured, Verdict
from tests.unit.verdicts import (
    CASES,
    MODES,
    all_kinds,
    broken_trial,
    impossible_trial,
    location,
    matrix,
    ok_trial,
    verdict,
    wrong_trial,
)

EVERY = [
    verdict(),
    verdict(ok_trial()),
    verdict(wrong_trial(), location=location()),
    verdict(broken_trial()),
    verdict(impossible_trial()),
    all_kinds(),
    matrix(options=3),
    matrix(MODES[:1], 40, CASES),
]


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
tried              result   seen
-----------------------------------------------------
eager, DDP         agrees
aot_eager, no DDP  agrees
aot_eager, DDP     DIFFERS  layers.0.weight, 512 ULPs
The lowest layer that is wrong: what ddpopt does around the compiled code.
The smallest set of compiled segments that shows it:
  - graph 0, segment 1: linear, relu
Script: repro_linears.py (run in a fresh interpreter, it shows the difference)

WRONG: pkg.module:model on 2 ranks: 2 findings; 1 trial: 1 wrong""",
    )


def test_trials_of_every_kind() -> None:
    assert_expected_inline(
        verdict_text(replace(all_kinds(), location=None)),
        """\
torch 2.13.0; ddpopt 0.1.0; python 3.11.2; device cpu; platform Linux

   mode                      ok  wrong  not possible  broken
------------------------------------------------------------
a  ddpopt-inline, aot_eager   1      -             -       -
b  ddpopt-split, aot_eager    -      1             -       -
c  torch, aot_eager           -      -             -       1
d  eager                      -      -             1       -

case pkg.module:model
option    a   b   c   d
-----------------------
default  ok  W1  B1   .
mixed     .   .   .  n1

W wrong, B broken, n not possible, with the number of the reason below; . did
  not run

W1: wrong, 1 trial
L0 bitwise does not hold: an aot_eager gradient equals eager's in every bit.
L3 structure does not hold: every planned bucket is reduced exactly once per
  backward.
  - pkg.module:model: ddpopt-split / default, aot_eager: L0: layers.0.weight:
    expected eager's gradient, got one that is 512 ULPs away at [3, 4] (bucket
    1, rank 1, step 2)
  - pkg.module:model: ddpopt-split / default, aot_eager: L3: bucket 1 was
    reduced 2 times in step 2 of rank 0, expected 1

B1: broken, 1 trial
  rank 1 died with signal 9
  File "model.py", line 7, in forward
    return self.layer(x)

n1: not possible, 1 trial
  eager itself cannot: RuntimeError: cpu backend doesn't support events

notes
  - L2 needs Inductor, so it was not applied

WRONG: pkg.module:model on 2 ranks: 2 findings; 4 trials: 1 ok, 1 wrong, 1 not
  possible, 1 broken""",
    )


@pytest.mark.parametrize("made", EVERY)
def test_every_line_fits_and_the_last_paragraph_is_the_verdict(made: Verdict) -> None:
    text = verdict_text(made)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.isascii()
    assert " ".join(text.split("\n\n")[-1].split()) == headline(made)


def test_what_is_equal_in_every_bit_is_said_so() -> None:
    text = verdict_text(verdict(ok_trial()))
    assert "L0              4  all equal, bit for bit     0      0      0\n" in text
    assert text.endswith("\n\nRIGHT: pkg.module:model on 2 ranks: 0 findings; 1 trial: 1 ok")


def test_lines_of_a_reason_and_findings_that_are_left_out_are_counted() -> None:
    reason = "\n".join(f"line {index}" for index in range(LINES + 7))
    text = verdict_text(verdict(replace(broken_trial(), reason=reason)))
    assert f"line {LINES}\n  ... 6 lines more, all in the JSON" in text
    many = replace(wrong_trial(), findings=wrong_trial().findings[:1] * 30, notes=tuple(map(str, range(10))))
    for made in (verdict(many), verdict(many, ok_trial())):
        assert f"and {30 - AT_MOST} findings more, all in the JSON" in verdict_text(made)
    assert "and 2 notes more, all in the JSON" in verdict_text(verdict(many))
    assert len(verdict_text(matrix()).splitlines()) < 6 * (35 + 5) + 80


def test_each_of_several_wrong_trials_has_a_finding_shown_before_any_has_two() -> None:
    text = verdict_text(verdict(*(wrong_trial(option=f"option {index}") for index in range(AT_MOST))))
    assert all(f"option {index}, aot_eager: L0: layers" in " ".join(text.split()) for index in range(AT_MOST))
    assert f"and {AT_MOST} findings more, all in the JSON" in text


def test_a_script_that_shows_nothing_is_not_praised_and_where_there_is_none_the_text_says_why() -> None:
    useless = replace(location(), reproduces=False)
    text = verdict_text(verdict(wrong_trial(), location=useless))
    assert "it did not show the difference" in " ".join(text.split())
    bare = replace(location(), script="", segments=(), note="it takes two ranks to see it")
    text = verdict_text(verdict(wrong_trial(), location=bare))
    assert "it takes two ranks to see it" in text
    assert "Script" not in text
    assert "segments" not in text


def test_a_sentence_adds_the_place_that_the_message_leaves_out() -> None:
    finding = Finding("L1", "claim", "it differs", rank=1, step=0, parameter="w", bucket=2)
    assert sentence(finding) == "it differs (parameter w, bucket 2, rank 1, step 0)"
    assert (
        sentence(replace(finding, message="w differs in step 0")) == "w differs in step 0 (bucket 2, rank 1)"
    )


def test_the_worst_error_is_the_one_that_takes_most_of_its_bound() -> None:
    def at(name: str, error: float, bound: float, ulps: float = 1.0) -> Measured:
        return Measured(name, "L1", None, ulps, error, bound, 0, 0)

    nan, inf = float("nan"), float("inf")
    entries = [
        at("near", 9, 10),
        at("far", 1, 10),
        at("equal", 0, 0),
        at("missed", 1e-30, 0),
        at("nan", nan, 1),
    ]
    assert [entry.parameter for entry in worst_first(entries)] == ["missed", "nan", "near", "far", "equal"]
    assert [share(entry) for entry in entries] == [0.9, 0.1, 0.0, inf, inf]
    ties = [at("b", 1, 1), at("a", 1, 1), at("c", 1, 1, ulps=nan)]
    assert [entry.parameter for entry in worst_first(ties)] == ["c", "a", "b"]
