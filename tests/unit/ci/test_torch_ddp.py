"""ci.torch_ddp.table: what the runs of torch's own tests amount to."""

import re
import unittest
from pathlib import Path

import pytest

from ci.torch_ddp import __main__ as main
from ci.torch_ddp.__main__ import ACCEPTED
from ci.torch_ddp.table import Accepted, Ending, Job, Outcome, judged, only_by_us, unaccepted

ROOT = Path(__file__).parents[3]
ENDINGS: dict[str, Ending] = {".": "passed", "F": "failed", "s": "skipped", "t": "timed out"}
WORDS = ("eager", "whole graph", "DDPOptimizer", "split", "inline")


def runs(test: str, letters: str, small: bool = False, builds: bool = True) -> dict[Job, Outcome]:
    """How `test` ended in eager and in each mode, one letter for each; a space for none."""
    pairs = [pair for pair in zip(WORDS, letters, strict=True) if pair[1] != " "]
    said = {mode: "" if letter == "." else f"{mode}\nno | way" for mode, letter in pairs}
    return {Job(test, mode, small): Outcome(ENDINGS[end], builds, message=said[mode]) for mode, end in pairs}


def test_only_tests_that_build_ddp_and_pass_in_eager_are_judged() -> None:
    outcomes = runs("b", ".....") | runs("a", ".FFFF") | runs("c", "F....") | runs("d", "s....")
    outcomes |= runs("e", ".....", builds=False) | runs("f", ".....", small=True)
    assert judged(outcomes, small=False) == ["a", "b"]
    assert judged(outcomes, small=True) == ["f"]


def test_a_test_that_one_way_of_torchs_passes_is_failed_only_by_us() -> None:
    outcomes = runs("a", "...F.") | runs("b", ".F..t") | runs("c", "..FFF") | runs("d", ".FFFF")
    assert only_by_us(outcomes, small=False) == {"a": ["split"], "b": ["inline"], "c": ["split", "inline"]}
    # what eager fails, or what nobody compared
    assert only_by_us(runs("a", "F..FF") | runs("b", ".  FF") | runs("c", "..  ."), small=False) == {}


def test_a_reason_accepts_a_test_with_all_caps_and_nothing_else() -> None:
    outcomes = runs("a", "...F.") | runs("a", "...FF", small=True) | runs("b", "....F", small=True)
    assert unaccepted(outcomes, {}) == ["a", "b"]
    assert unaccepted(outcomes, {"a": Accepted("no | way", "so.")}) == ["b"]
    assert unaccepted(outcomes, {"a": Accepted("", "so."), "b": Accepted("", "so.")}) == []
    outcomes = runs("a", "...FF")  # of which the reason is for one alone
    assert unaccepted(outcomes, {"a": Accepted("split", "so.")}) == ["a"]
    assert unaccepted(outcomes | runs("a", "...F."), {"a": Accepted("split", "so.")}) == []


def test_reasons_are_for_tests_that_torch_has_and_say_where_they_fail() -> None:
    import torch

    suite = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
    names = re.findall(r"def (test_\w+)\(", suite.read_text())
    assert ACCEPTED.keys() <= {*names}
    assert all(accepted.where for accepted in ACCEPTED.values())


@pytest.mark.parametrize(("letters", "exit_code"), [(".....", 0), ("...F.", 1), ("F....", 3), ("s....", 3)])
def test_a_table_without_a_test_is_no_pass(
    letters: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = type("Suite", (unittest.TestCase,), {"test_a": lambda self: None})
    monkeypatch.setattr(main, "torch_tests", lambda: suite)
    monkeypatch.setattr(main, "prepare", lambda: None)
    monkeypatch.setattr(main, "run_all", lambda *_: runs("a", letters))
    assert main.main(["test_a", "--caps", "own"]) == exit_code
