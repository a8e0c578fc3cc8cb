"""Tests of the pure parts of `benchmarks.planning`, and of the model that it measures."""

import pytest

from benchmarks.gpt import GptLike
from benchmarks.planning import OURS, THEIRS, Timing, growth_exponent, judge


def timings(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, list[Timing]]:
    return {
        name: [Timing(layers, 30 * layers, layers + 2, (seconds,)) for layers, seconds in found.items()]
        for name, found in ((OURS, ours), (THEIRS, theirs))
    }


def test_embedding_layers_and_head_have_one_size() -> None:
    model = GptLike(2)
    sizes = {
        sum(p.numel() for p in part.parameters()) for part in (model.embedding, *model.layers, model.head)
    }
    assert sizes == {model.layer_bytes // 4}


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_found(exponent: float) -> None:
    sizes = [12, 48, 200]
    assert growth_exponent(sizes, [0.01 * size**exponent for size in sizes]) == pytest.approx(exponent)


def test_twenty_times_faster_and_linear_is_enough() -> None:
    verdict = judge(timings({100: 1.0, 200: 2.0}, {100: 10.0, 200: 40.0}))
    assert verdict.problems == ()
    assert verdict.ratios == {100: 10.0, 200: 20.0}
    assert verdict.exponents == pytest.approx({OURS: 1.0, THEIRS: 2.0})


def test_only_the_largest_size_has_to_be_twenty_times_faster() -> None:
    verdict = judge(timings({200: 2.0}, {200: 39.0}))
    assert verdict.problems == ("19.5 times faster at 200 layers, asked 20",)


def test_growing_faster_than_asked_is_a_problem() -> None:
    verdict = judge(timings({100: 1.0, 200: 4.0}, {100: 100.0, 200: 400.0}))
    assert verdict.problems == ("time grows as layers ** 2.00, asked at most 1.2",)


def test_fewer_segments_than_layers_is_less_work_than_asked() -> None:
    found = timings({200: 1.0}, {200: 40.0})
    found[OURS] = [Timing(200, 6000, 100, (1.0,))]
    assert judge(found).problems == ("100 segments for 200 layers",)


def test_ratios_are_of_medians_and_growth_is_of_the_fastest() -> None:
    ours = [Timing(100, 1, 102, (1.0, 2.0, 9.0)), Timing(200, 1, 202, (2.0, 2.0, 2.0))]
    theirs = [Timing(100, 1, 102, (40.0,)), Timing(200, 1, 202, (80.0,))]
    verdict = judge({OURS: ours, THEIRS: theirs})
    assert verdict.ratios == {100: 20.0, 200: 40.0}
    assert verdict.exponents[OURS] == pytest.approx(1.0)
