"""One outcome for one test on several ranks, and the words for a different collection."""

from copy import deepcopy
from typing import Literal

import pytest
from _pytest.reports import TestReport

from ddpopt.testing.reports import ADVICE, difference, from_text, merge, to_text, trimmed

STACKS = """\
Fatal Python error: Aborted

Thread 0x00007f48d07286c0 (most recent call first):
  File "/somewhere/ddpopt/ranks/limits.py", line 111 in _end
  File "/python/threading.py", line 1401 in run

Current thread 0x00007f48f1019b80 (most recent call first):
  File "/suite/test_a.py", line 10 in test_stall
  File "/site-packages/_pytest/python.py", line 187 in pytest_pyfunc_call
  File "/site-packages/pluggy/_callers.py", line 121 in _multicall
  File "/somewhere/ddpopt/testing/pooled_rank.py", line 80 in run
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core, torch._C (total: 2)
"""
TRIMMED = """\
Fatal Python error: Aborted

Current thread 0x00007f48f1019b80 (most recent call first):
  File "/suite/test_a.py", line 10 in test_stall

"""
Outcome = Literal["passed", "failed", "skipped"]


def report(
    outcome: Outcome, when: Literal["setup", "call", "teardown"] = "call", why: str = "", stop: float = 0
) -> TestReport:
    return TestReport("test_a.py::test", ("test_a.py", 0, "test"), {}, outcome, why or None, when, stop=stop)


def merged(*reports_of: list[TestReport]) -> dict[str, tuple[str, str]]:
    return {str(one.when): (one.outcome, one.longreprtext) for one in merge(reports_of)}


PASSED = report("passed")


BOOM, PEERLESS = report("failed", why="boom", stop=1), report("failed", why="no peer", stop=2)
KNOWN = report("skipped")
KNOWN.wasxfail = "known"
SOME = (
    "expected that all ranks run a test, or none; rank(s) 1 of 2 skipped it. Let the reason for a skip be "
    "the same on every rank."
)


@pytest.mark.parametrize(
    ("reports_of", "outcome", "words"),
    [
        pytest.param(
            [[PEERLESS], [BOOM]],
            "failed",
            "[rank 1] call failed:\nboom\n\n[rank 0] call failed:\nno peer",
            id="who failed first is shown first",
        ),
        pytest.param(
            [[BOOM], [PEERLESS], [BOOM]],
            "failed",
            "[rank 0, 2] call failed:\nboom\n\n[rank 1] call failed:\nno peer",
            id="what ranks tell alike is told once",
        ),
        pytest.param(
            [[report("passed", "setup"), PASSED], [report("skipped", "setup")]],
            "failed",
            SOME,
            id="a skip on some ranks only is a failure",
        ),
        pytest.param([[PASSED], [KNOWN]], "passed", "", id="an expected failure is no skip"),
    ],
)
def test_one_outcome_is_made_of_those_of_all_ranks(
    reports_of: list[list[TestReport]], outcome: str, words: str
) -> None:
    assert merged(*deepcopy(reports_of))["call"] == (outcome, words)


def test_reports_travel_as_text_with_the_place_of_a_skip(pytestconfig: pytest.Config) -> None:
    skipped = report("skipped", "setup")
    skipped.longrepr = ("test_a.py", 3, "Skipped: not today")
    sent = [report("passed", "setup"), report("failed", why="boom"), skipped]
    got = from_text(pytestconfig, to_text(pytestconfig, sent))
    assert [(one.when, one.outcome, one.longreprtext) for one in got[:2]] == [
        ("setup", "passed", ""),
        ("call", "failed", "boom"),
    ]
    assert got[2].longrepr == skipped.longrepr


def test_stacks_are_shown_without_what_lies_under_every_test() -> None:
    assert trimmed(STACKS) == TRIMMED


@pytest.mark.parametrize(
    ("names_of", "expected"),
    [
        (
            [["a", "b"], ["a", "b"], ["b", "c"]],
            ["  rank 2 lacks 1 of rank 0's 2 tests: a", "  rank 2 has 1 that rank 0 lacks: c"],
        ),
        ([["a", "b"]] * 3, []),
        ([["a", "b"], ["a", "b", "b"]], ["  rank 1 has them in another order"]),
        (
            [[f"t{n}" for n in range(8)], []],
            ["  rank 1 lacks 8 of rank 0's 8 tests: t0, t1, t2, t3, t4 … and 3 more"],
        ),
    ],
)
def test_what_ranks_collected_differently_is_named_by_rank(
    names_of: list[list[str]], expected: list[str]
) -> None:
    lines = ["the ranks collected different tests:", *expected, ADVICE]
    assert difference(names_of).splitlines() == (lines if expected else [])
