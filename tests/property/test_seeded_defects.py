"""Fuzzing finds each defect that is put back into ddpopt, among the models that it draws in five minutes."""

import re
from itertools import islice
from typing import Any

import pytest

from ddpopt.fuzz.questions import Outcome
from ddpopt.fuzz.stream import Source
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import DrawnModel
from tests.selftest.defects import DEFECTS, Defect
from tests.selftest.sites import Site
from tests.support.found import examined

FIVE_MINUTES = 500
"""Models that two workers draw and judge in five minutes, when nothing else runs."""
HARMFUL = [defect for defect in DEFECTS if not defect.is_harmless]
EACH = pytest.mark.parametrize("defect", HARMFUL, ids=lambda defect: defect.name)


def by_day() -> list[Any]:
    """By day one in three; of those about unnoticed writes, which are rows of one table, one in six."""
    forgotten = [defect for defect in DEFECTS if defect.name.startswith("it goes unnoticed")]
    others = [defect for defect in DEFECTS if defect not in forgotten]
    by_day = [*forgotten[::6], *others[::3]]
    night = [defect for defect in DEFECTS if defect not in by_day]
    return [pytest.param(d, marks=pytest.mark.nightly if d in night else (), id=d.name) for d in DEFECTS]


pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")


def judged(alone: Ranks, defect: Defect, model: DrawnModel) -> Outcome:
    with defect.inject(Site(0, 1)):
        (answer,) = examined(alone, model, defect.mode)
    return answer.kind


@pytest.mark.parametrize("defect", by_day())
def test_a_defect_has_a_model_that_shows_it(defect: Defect, alone: Ranks) -> None:
    assert re.search(defect.trace, defect.shown_by.source)
    shown = Outcome.OK if defect.is_harmless else Outcome.WRONG
    assert judged(alone, defect, defect.shown_by) is shown


@EACH
@pytest.mark.nightly
def test_a_defect_is_found_within_five_minutes_of_drawing(defect: Defect, alone: Ranks) -> None:
    drawn = (model for _, model in islice(Source(0).models(), FIVE_MINUTES))
    telling = (model for model in drawn if re.search(defect.trace, model.source))  # others cannot show it
    assert any(judged(alone, defect, model) is Outcome.WRONG for model in telling)
