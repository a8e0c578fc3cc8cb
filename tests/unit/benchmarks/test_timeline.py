"""Tests of `benchmarks.timeline`: the picture of one step of each mode."""

from xml.etree import ElementTree

import pytest

from benchmarks.step_trace import Trace
from benchmarks.timeline import LEFT, RIGHT, WIDTH, draw, tracks

SVG = "{http://www.w3.org/2000/svg}"


def trace(end: float = 10.0) -> Trace:
    transfers = ((3.5, 6.0), (5.5, end - 1))
    return Trace((0.0, 2.0), (2.0, end - 1), 6.0, (end - 1, end), (3.0, 5.0), transfers)


def test_transfers_at_one_time_stand_on_tracks_of_their_own() -> None:
    assert tracks([(0, 5), (1, 9), (5, 7), (9, 10)]) == [0, 1, 0, 0]


def test_the_picture_has_a_bar_for_each_transfer_and_waiting_begins_when_computing_has_ended() -> None:
    picture = ElementTree.fromstring(draw("a step", {"eager": trace(), "inline": trace(20)}, limit_ms=9.0))
    kinds = [element.get("class") for element in picture.iter(f"{SVG}rect")]
    assert kinds.count("transfer") == 1 + 4  # the legend's, and two for each mode
    backward, waiting = (
        [element for element in picture.iter(f"{SVG}rect") if element.get("class") == kind][-1]
        for kind in ("backward", "waiting")
    )
    ends = float(backward.get("x", 0)) + float(backward.get("width", 0))
    assert ends == pytest.approx(float(waiting.get("x", 0)), abs=0.2)
    assert float(waiting.get("x", 0)) == pytest.approx(LEFT + 6 / 20 * (WIDTH - LEFT - RIGHT), abs=0.2)
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"eager", "inline", "10 ms", "20 ms", "physical limit"} <= {*words}


def test_without_a_limit_no_line_is_drawn() -> None:
    picture = ElementTree.fromstring(draw("a step", {"eager": trace()}, limit_ms=None))
    assert "limit" not in [element.get("class") for element in picture.iter(f"{SVG}line")]


def test_a_mode_that_sends_nothing_can_be_drawn() -> None:
    silent = Trace((0, 1), (1, 3), 3, (3, 4), (), ())
    assert "4 ms" in draw("a step", {"eager": silent}, None)
