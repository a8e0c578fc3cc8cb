"""Tests of `benchmarks.planning`: what is judged, what is timed, and the model that it measures."""

import pytest

from benchmarks.planning import OURS, THEIRS, Timing, section


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (
            {100: 1.0, 200: 2.0, 1700: 17.0},
            {100: 10.0, 200: 40.0},
            [(20.0, True), (pytest.approx(1.0), True), (51_000, True), (1702 / 1700, True)],
        ),
        (
            {100: 1.0, 200: 4.0},
            {200: 400.0},
            [(100.0, True), (pytest.approx(2.0), False), (None, False), (1.01, True)],
        ),
    ],
)
def test_twenty_times_faster_with_linear_growth_to_fifty_thousand_nodes_is_enough(
    ours: dict[int, float], theirs: dict[int, float], expected: list[tuple[float | None, bool]]
) -> None:
    found = {
        name: [Timing(layers, 30 * layers, layers + 2, (seconds,)) for layers, seconds in times.items()]
        for name, times in ((OURS, ours), (THEIRS, theirs))
    }
    # of the ratio, the growth, the nodes and the segments
    assert [(claim.found, claim.held) for claim in section(found, {}).claims] == expected
