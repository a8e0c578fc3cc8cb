"""Tests of `benchmarks.planning`: what is judged, what is timed, and the model that it measures."""

import pytest

from benchmarks.planning import OURS, THEIRS, Timing, section


def timings(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, list[Timing]]:
    return {
        name: [Timing(layers, 30 * layers, layers + 2, (seconds,)) for layers, seconds in found.items()]
        for name, found in ((OURS, ours), (THEIRS, theirs))
    }


def claims(found: dict[str, list[Timing]]) -> list[tuple[float | None, bool]]:
    """Of the ratio, the growth, the nodes and the segments: what was found, and whether it held."""
    return [(claim.found, claim.held) for claim in section(found, {}).claims]


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (
            {100: 1.0, 200: 2.0, 1700: 17.0},
            {100: 10.0, 200: 40.0},
            [(20.0, True), (pytest.approx(1.0), True), (51_000, True), (1702 / 1700, True)],
        ),
        ({200: 2.0}, {200: 39.0}, [(19.5, False), (None, False), (None, False), (1.01, True)]),
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
    assert claims(timings(ours, theirs)) == expected


def test_ratios_are_medians_of_rounds_with_their_spread_and_growth_is_of_the_fastest() -> None:
    ours = [Timing(100, 1, 102, (1.0, 2.0, 9.0)), Timing(200, 1, 202, (2.0, 2.0, 2.0))]
    theirs = [Timing(200, 1, 202, (50.0, 60.0, 80.0))]
    ratio, growth, *_ = section({OURS: ours, THEIRS: theirs}, {}).claims
    assert (ratio.found, ratio.spread, ratio.asked) == (30.0, (25.0, 40.0), "at least 20")
    assert (round(growth.found or 0, 6), growth.limit) == (1.0, 1.0)
