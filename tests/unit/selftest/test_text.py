"""tests.selftest.text: who found which fault, and what each level overlooked."""

from dataclasses import replace

from expecttest import TestCase

from tests.selftest.self_test import SelfTest
from tests.selftest.text import self_test_text
from tests.selftest.trials import Found
from tests.unit.verdicts import impossible_trial, ok_trial, verdict

PLAN = Found(
    "two buckets are swapped", "plan", True, ("L3",), ("L3",), "the plan", "ddpopt-inline", "aot_eager"
)
CUT = Found(
    "a mutation is lost", "partition", True, ("certificate",), ("certificate",), "no", "ddpopt-split", "x"
)
WIRE = Found("a bucket is not reduced", "communication", True, ("L0", "L1"), ("L0", "L1"), "off", "m", "b")
RIGHT = SelfTest((PLAN, CUT, WIRE), verdict(ok_trial(), replace(ok_trial("tied"), backend="inductor")))
WRONG = SelfTest(
    (
        PLAN,
        replace(CUT, by=(), message="nothing was said of it"),
        replace(WIRE, by=("L0",)),
        replace(WIRE, fault="no_sync is ignored", injected=False, by=(), message="StopIteration"),
    ),
    verdict(ok_trial(), impossible_trial("tied")),
    3,
    ("a bucket is off by one ULP",),
)


class TestText(TestCase):
    maxDiff = None

    def test_what_was_not_found_not_injected_overlooked_or_left_out_is_named(self) -> None:
        self.assertExpectedInline(
            self_test_text(WRONG),
            """\
layer          fault                                found by
----------------------------------------------------------------
plan           two buckets are swapped              L3
partition      a mutation is lost                   NOBODY
                 not found: nothing was said of it
communication  a bucket is not reduced              L0
                 overlooked by L1
communication  no_sync is ignored                   NOT INJECTED
                 not injected: StopIteration

layer          faults  found  L3  L0
------------------------------------
plan                1      1   1   -
partition           1      0   -   -
communication       2      1   -   1

level        what it is                                had to find  found   rate
--------------------------------------------------------------------------------
certificate  the proof that a cut graph is the same              1      0    0 %
             program
L3           structure                                           1      1  100 %
L0           equality                                            1      1  100 %
L1           the bound on a sum over ranks                       1      0    0 %

2 of 4 faults found on 3 ranks; 1 found by nobody, 1 not injected, 1 overlooked
by a level that had to find it
left out, for on 3 ranks it is rounding: a bucket is off by one ULP
1 of 2 clean runs raised nothing (1 aot_eager, 1 not run)
  tied: eager / mixed: not possible: eager itself cannot: RuntimeError: cpu
    backend doesn't support events""",
        )


def test_no_line_is_wider_than_a_terminal() -> None:
    assert max(map(len, self_test_text(WRONG).splitlines())) <= 80
