"""Fuzzing finds each defect that is put back into ddpopt, among the models that it draws in a minute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from ddpopt.fuzz.cases import task_of
from ddpopt.fuzz.examine import examine
from ddpopt.fuzz.questions import Outcome, Setting
from ddpopt.fuzz.stream import Source
from ddpopt.judge.trials import quickly
from ddpopt.ranks.group import Ranks, joined, one_rank
from ddpopt.testing.drawn import DrawnModel
from tests.selftest.defects import DEFECTS, Defect
from tests.selftest.sites import Site

A_MINUTE = 100
"""Models that two workers draw and judge in a minute, when nothing else runs."""
EACH = pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)


def by_day() -> list[Any]:
    """All of them; of those in what nobody knows to write, which are one table's rows, one in four by day."""
    forgotten = [defect for defect in DEFECTS if defect.name.startswith("nobody knows")]
    night = [defect for place, defect in enumerate(forgotten) if place % 4]
    return [pytest.param(d, marks=pytest.mark.nightly if d in night else (), id=d.name) for d in DEFECTS]


pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank(), joined(timeout_s=60) as made, quickly():
        yield made


def judged(ranks: Ranks, defect: Defect, model: DrawnModel) -> Outcome:
    with defect.inject(Site(0, 1)):
        (answer,) = examine(ranks, task_of(model, (defect.mode,), Setting("aot_eager")), lambda _: None)
    return answer.kind


@pytest.mark.parametrize("defect", by_day())
def test_a_defect_has_a_model_that_shows_it(defect: Defect, ranks: Ranks) -> None:
    assert re.search(defect.trace, defect.shown_by.source)
    assert judged(ranks, defect, defect.shown_by) is Outcome.WRONG


@EACH
@pytest.mark.nightly
def test_a_defect_is_found_within_a_minute_of_drawing(defect: Defect, ranks: Ranks) -> None:
    drawn = (model for _, model in islice(Source(0).models(), A_MINUTE))
    telling = (model for model in drawn if re.search(defect.trace, model.source))  # others cannot show it
    assert any(judged(ranks, defect, model) is Outcome.WRONG for model in telling)
