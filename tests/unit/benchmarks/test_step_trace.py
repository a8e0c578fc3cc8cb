"""Tests of `benchmarks.step_trace`: when computing ended, and what share of all sending nothing hides."""

import pytest

from benchmarks.step_trace import Span, exposed_share
from ddpopt.tuning.simulate import Sent, Timeline


@pytest.mark.parametrize(
    ("transfers", "share"),
    [
        pytest.param(((2.0, 4.0), (4.0, 5.0)), 0, id="hidden while the backward computes"),
        pytest.param(((4.0, 8.0),), 0.75, id="counted from when computing ended"),
        pytest.param(((3.0, 7.0), (3.0, 7.0), (4.0, 5.0)), 0.5, id="counted once at one time"),
        pytest.param(((3.0, 4.0), (8.0, 9.0)), 0.5, id="a rest is no all-reduce time"),
    ],
)
def test_what_is_sent_after_computing_ended_is_exposed(transfers: tuple[Span, ...], share: float) -> None:
    buckets = [Sent(index, 0, span[0], *span) for index, span in enumerate(transfers)]
    assert exposed_share(Timeline(tuple(buckets), 2.0, 5.0, 9.0, 10.0)) == share
