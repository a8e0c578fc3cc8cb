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

2 of 4 faults found on 3 ranks: 1 of 1 in plan, 0 of 1 in partition, 1 of 2 in
communication
left out, for on 3 ranks it is rounding: a bucket is off by one ULP
1 of 2 clean runs raised nothing (1 aot_eager, 1 not run)
  tied: eager / mixed: not possible: eager itself cannot: RuntimeError: cpu
    backend doesn't support events""",
        )


def test_no_line_is_wider_than_a_terminal() -> None:
    assert max(map(len, self_test_text(WRONG).splitlines())) <= 80
