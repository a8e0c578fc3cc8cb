"""One outcome for one test on several ranks, and the words for a different collection."""

from copy import deepcopy
from typing import Literal

import pytest
from _pytest.reports import TestReport

from ddpopt.testing.reports import ADVICE, difference, merge

Outcome = Literal["passed", "failed", "skipped"]


def report(
    outcome: Outcome, when: Literal["setup", "call", "teardown"] = "call", why: str = "", stop: float = 0
) -> TestReport:
    return TestReport("test_a.py::test", ("test_a.py", 0, "test"), {}, outcome, why or None, when, stop=stop)


def told(boom: str, peerless: str) -> str:
    """What is shown of the two failures, by ranks."""
    return f"[rank {boom}] call failed:\nboom\n\n[rank {peerless}] call failed:\nno peer"


BEGAN, PASSED, SKIPPED = report("passed", "setup"), report("passed"), report("skipped", "setup")
BOOM, PEERLESS = report("failed", why="boom", stop=1), report("failed", why="no peer", stop=2)
KNOWN = report("skipped")
KNOWN.wasxfail = "known"
SOME = (
    "expected all ranks to run a test, or none; rank(s) 1 of 2 skipped it. Make the reason for a skip the "
    "same on every rank."
)


@pytest.mark.parametrize(
    ("reports_of", "outcome", "words"),
    [
        pytest.param([[PEERLESS], [BOOM]], "failed", told("1", "0"), id="who failed first is shown first"),
        pytest.param([[BOOM], [PEERLESS], [BOOM]], "failed", told("0, 2", "1"), id="the same is told once"),
        pytest.param([[BEGAN, PASSED], [SKIPPED]], "failed", SOME, id="a skip on some ranks is a failure"),
        pytest.param([[PASSED], [KNOWN]], "passed", "", id="an expected failure is no skip"),
    ],
)
def test_ranks_have_one_outcome(reports_of: list[list[TestReport]], outcome: str, words: str) -> None:
    (call,) = (one for one in merge(deepcopy(reports_of)) if one.when == "call")
    assert (call.outcome, call.longreprtext) == (outcome, words)


@pytest.mark.parametrize(
    ("names_of", "expected"),
    [
        (
            [["a", "b"], ["a", "b"], ["b", "c"]],
            ["  rank 2 lacks 1 of rank 0's 2 tests: a", "  rank 2 has 1 that rank 0 lacks: c"],
        ),
        ([["a", "b"]] * 3, []),
        ([["a", "b"], ["a", "b", "b"]], ["  rank 1 has them in another order"]),
        ([[f"t{n}" for n in range(8)], []], ["  rank 1 lacks 8 of rank 0's 8 tests: t0"]),
    ],
)
def test_what_ranks_collected_is_told_by_rank(names_of: list[list[str]], expected: list[str]) -> None:
    lines = ["the ranks collected different tests:", *expected, ADVICE]
    assert difference(names_of).splitlines() == (lines if expected else [])
