"""Tests of `benchmarks.planning`: what is judged, what is timed, and the model that it measures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import planning
from benchmarks.gpt import GptLike
from benchmarks.planning import Optimize, main
from benchmarks.planning_rows import OURS, THEIRS, Timing, growth_exponent, judge


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


def test_growth_is_over_all_sizes_and_the_ratio_at_the_largest_of_both() -> None:
    verdict = judge(timings({100: 1.0, 200: 2.0, 1700: 17.0}, {100: 20.0, 200: 80.0}))
    assert verdict.ratios == {100: 20.0, 200: 40.0}
    assert verdict.exponents == pytest.approx({OURS: 1.0, THEIRS: 2.0})
    assert verdict.problems == ()


def test_a_deep_model_that_takes_too_long_shows_in_the_growth() -> None:
    verdict = judge(timings({100: 1.0, 200: 2.0, 1700: 100.0}, {100: 20.0, 200: 80.0}))
    assert verdict.problems == ("time grows as layers ** 1.67, asked at most 1.2",)


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What `main` has timed, without timing anything."""
    names = {optimize: name for name, optimize in planning.OPTIMIZERS.items()}
    found: list[tuple[int, str]] = []

    def time_one(layers: int, optimize: Optimize) -> Timing:
        found.append((layers, names[optimize]))
        return Timing(layers, 30 * layers, layers + 2, (layers * (1.0 if names[optimize] == OURS else 25.0),))

    @contextmanager
    def no_group() -> Iterator[None]:
        yield

    monkeypatch.setattr(planning, "time_one", time_one)
    monkeypatch.setattr(planning, "single_rank", no_group)
    return found


def test_deep_models_are_timed_with_ddpopt_alone(asked_for: list[tuple[int, str]], tmp_path: Path) -> None:
    kept = tmp_path / "planning.json"
    words = ["--layers", "20,10", "--deep", "90,20", "--repeat", "2", "--json", str(kept)]
    assert main(words) == 0
    one_round = [(10, OURS), (10, THEIRS), (20, OURS), (20, THEIRS), (90, OURS)]
    assert asked_for == [(2, OURS), (2, THEIRS), *one_round, *one_round]
    found = json.loads(kept.read_text())["timings"]
    assert [(timing["layers"], len(timing["seconds"])) for timing in found[OURS]] == [
        (10, 2),
        (20, 2),
        (90, 2),
    ]
    assert [timing["layers"] for timing in found[THEIRS]] == [10, 20]


def test_what_only_ddpopt_was_timed_for_stands_in_the_same_table(
    asked_for: list[tuple[int, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--layers", "20", "--deep", "90", "--repeat", "1"])
    both, alone = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│"))
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in (both, alone)]
    assert [row[0] for row in cells] == ["20", "90"]
    assert cells[0][-3:] == ["500.000 (500.000 – 500.000)", "22", "25.0"]
    assert cells[1][-3:] == ["–", "–", "–"]


def test_none_is_no_deep_model(asked_for: list[tuple[int, str]]) -> None:
    main(["--layers", "20", "--deep", "none", "--repeat", "1"])
    assert {layers for layers, _ in asked_for} == {2, 20}
