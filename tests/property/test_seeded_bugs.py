"""The properties of cutting find bugs that are put in, and shrink each to a graph of a few nodes."""

import statistics
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import settings

from tests.property import strategies
from tests.property.seeded_bugs import BUGS, CUT_ANYWHERE, CUT_AS_PLANNED, draw_only, look_for
from tests.property.strategies import graph_features

ENOUGH = 20
LARGEST_MEDIAN_OPS = 6


@pytest.mark.long
@pytest.mark.timeout(900)  # twenty bugs, some seconds each, on cores that others may use too
@pytest.mark.skipif(
    settings.get_current_profile_name() == "dev",
    reason="it judges the examples of profile ci, for most of a minute: profiles ci and nightly",
)
def test_each_bug_that_is_put_in_is_found_and_shrinks_to_a_few_operations() -> None:
    found = {name: look_for(name) for name in BUGS}
    assert [name for name, each in found.items() if each is None] == []
    assert len(found) >= ENOUGH
    # not by a slip of the bug itself
    assert {each.error for each in found.values() if each is not None} <= {
        "CertificateError",
        "AssertionError",
        "KeyError",
    }
    ops = {name: each.ops for name, each in found.items() if each is not None}
    assert statistics.median(ops.values()) <= LARGEST_MEDIAN_OPS, ops


@pytest.mark.parametrize("property_of_ci", [CUT_ANYWHERE, CUT_AS_PLANNED])
def test_the_examples_of_ci_have_every_step_and_output(property_of_ci: Callable[[], None]) -> None:
    """Which are drawn follows from the text of the property: a lucky one would hide what it never tries."""
    with patch.object(strategies, "event") as told:
        draw_only(property_of_ci)
    words = {call.args[0].partition(": ")[2] for call in told.call_args_list}
    assert graph_features() - words == set()
