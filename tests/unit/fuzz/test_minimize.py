"""Making a failure small: by the same failure alone, cheap ways first, in few tries."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpopt.errors import NotJudgedError
from ddpopt.fuzz import asking
from ddpopt.fuzz.asking import write_script
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.minimize import Minimized, minimized, smaller, weight
from ddpopt.fuzz.questions import Answer, Outcome, Setting
from ddpopt.fuzz.scripting import script_of
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.fuzz.text import minimized_lines
from ddpopt.testing.drawn import DrawnModel, step
from tests.support.refusals import refusal

FAILURE = FailureSignature("error", "KeyError", "graph.py in find")
OTHER = FailureSignature("error", "IndexError", "graph.py in find")
NOISE = (step("linear", 1), step("in_place", 2, by="item"), step("batch_norm2d"), step("scale", 2))
CASE = FoundCase(
    DrawnModel(
        steps=(*NOISE, step("residual", body=(step("gain", 1), step("conv1d"))), *NOISE, step("product", 3)),
        outputs=(step("earlier"),),
        takes="dict",
        batches=(2, 3),
        width=16,
        cap_bytes=1024,
        joined=False,
        seed=7,
    ),
    "torch",
    Setting("inductor", nproc=2),
    FAILURE,
)


def blocks(case: FoundCase) -> set[str]:
    return {each.block for each in case.model.all_steps()}


class Asked:
    """Fails as told where a model has some blocks, otherwise where it lacks one of them; keeps count."""

    def __init__(self, *needed: str, also: Callable[[FoundCase], bool] = lambda _: True) -> None:
        self.needed = set(needed)
        self.also = also
        self.cases: list[FoundCase] = []

    def __call__(self, case: FoundCase) -> Answer:
        self.cases.append(case)
        if self.needed <= blocks(case) and self.also(case):
            return Answer(case.mode, Outcome.WRONG, FAILURE)
        if self.needed & blocks(case):
            return Answer(case.mode, Outcome.WRONG, OTHER)
        return Answer(case.mode, Outcome.OK)


def test_what_is_left_is_what_the_failure_needs_and_what_fails_in_another_way_is_not_taken() -> None:
    asked = Asked("gain", "product")
    found = minimized(CASE, asked)
    assert found.case.model == DrawnModel(
        steps=(step("gain", 0), step("product")), width=4, cap_bytes=2**20, batches=(2,)
    )
    cheapest = Setting("eager", nproc=1, steps=1)
    assert found.case.setting == cheapest
    assert {repr(case.setting) for case in asked.cases[4:]} == {repr(cheapest)}
    assert found.ended
    assert any(len(blocks(case) & {"gain", "product"}) == 1 for case in asked.cases)


def test_what_the_failure_needs_of_the_setting_is_kept() -> None:
    def needs(case: FoundCase) -> bool:
        return case.setting.nproc == 2 and case.setting.backend != "eager" and case.setting.steps > 1

    found = minimized(CASE, Asked("gain", also=needs))
    assert found.case.setting == Setting("aot_eager", nproc=2, steps=2)


def test_a_step_that_reads_far_back_reads_the_same_where_those_between_go() -> None:
    layers = (step("gain"), *(step("linear") for _ in range(5)), step("halved", 5))

    def reads_the_gain(case: FoundCase) -> bool:
        names = [each.block for each in case.model.steps]
        return names[-1] == "halved" and names[-2 - case.model.steps[-1].reads[0]] == "gain"

    case = replace(CASE, model=DrawnModel(steps=layers))
    found = minimized(case, Asked("gain", "halved", also=reads_the_gain))
    assert found.case.model.steps == (step("gain"), step("halved"))


def test_a_case_that_fails_in_another_way_is_refused_with_both_failures() -> None:
    def judged(*ending: Any) -> str:
        case = replace(CASE, torch="2.12.0")
        return refusal(lambda: minimized(case, lambda case: Answer(case.mode, *ending)), NotJudgedError)

    assert judged(Outcome.WRONG, OTHER) == (
        "expected a case that fails as recorded: error: KeyError in graph.py in find; here the result is: "
        "wrong: error: IndexError in graph.py in find. It was found with torch 2.12.0"
    )
    assert "here the result is: ok" in judged(Outcome.OK)


def test_a_search_that_runs_out_of_tries_says_so_keeps_its_result_and_reports_progress() -> None:
    asked = Asked("gain", "product")
    told: list[Minimized] = []
    found = minimized(CASE, asked, tries=6, tell=told.append)
    assert (found.ended, found.tries) == (False, 6)
    assert len(asked.cases) == 7  # the first one is the case itself
    assert blocks(found.case) >= {"gain", "product"}
    assert [one.tries for one in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1] == found
    weights = [weight(one.case.model) for one in told]
    assert weights == sorted(weights, reverse=True)


def test_each_candidate_is_smaller_so_that_a_search_comes_to_an_end() -> None:
    candidates = list(smaller(CASE.model))
    assert all(weight(each) < weight(CASE.model) for each in candidates)
    assert len(set(map(repr, candidates))) == len(candidates) > 50
    assert list(smaller(DrawnModel(width=4, cap_bytes=2**20))) == []


TOLD = {1: "interpreter", 2: "with 2 steps", 3: "with 3 steps", 4: "DOES NOT REPRODUCE", 9: "did not end"}


@pytest.mark.parametrize("needed", TOLD)
def test_a_script_runs_the_fewest_steps_that_show_the_failure_and_says_how_many(
    needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FoundCase(DrawnModel((step("linear"),)), "whole", Setting(steps=1), FAILURE, Outcome.BACKEND)

    def shows(file: Path, *_: Any, **__: Any) -> bool | None:
        if needed == 9:
            return None
        return any(f"range({steps})" in file.read_text() for steps in range(needed, 4))

    monkeypatch.setattr(asking, "answer_of", lambda *_: Answer("whole", Outcome.BACKEND, FAILURE))
    monkeypatch.setattr(asking, "shows_in_fresh_interpreter", shows)
    script = tmp_path / "x.py"
    ran, reproduces = write_script(case, script, 60.0)
    assert (reproduces, ran.setting.steps) == (
        None if needed == 9 else needed <= 3,
        needed if needed <= 3 else 1,
    )
    assert script.read_text() == script_of(ran, "x.py")
    *_, last = minimized_lines(Minimized(case, case, 1, ended=True), "x.py", ran, reproduces)
    assert TOLD[needed] in last
