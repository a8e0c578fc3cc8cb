"""Tests of `benchmarks.planning`: what is judged, what is timed, and the model that it measures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import planning
from benchmarks.gpt import GptLike
from benchmarks.planning import OURS, THEIRS, Optimize, Timing, main, section


def timings(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, list[Timing]]:
    return {
        name: [Timing(layers, 30 * layers, layers + 2, (seconds,)) for layers, seconds in found.items()]
        for name, found in ((OURS, ours), (THEIRS, theirs))
    }


def claims(found: dict[str, list[Timing]]) -> list[tuple[float | None, bool]]:
    """Of the ratio, the growth, the nodes and the segments: what was found, and whether it held."""
    return [(claim.found, claim.held) for claim in section(found, {}).claims]


def test_embedding_layers_and_head_have_one_size() -> None:
    model = GptLike(2)
    sizes = {
        sum(p.numel() for p in part.parameters()) for part in (model.embedding, *model.layers, model.head)
    }
    assert sizes == {model.layer_bytes // 4}


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


def test_fewer_segments_than_layers_is_less_work_than_asked() -> None:
    found = {OURS: [Timing(200, 6000, 100, (1.0,))], THEIRS: [Timing(200, 6000, 202, (40.0,))]}
    assert claims(found)[-1] == (0.5, False)


def test_ratios_are_medians_of_rounds_with_their_spread_and_growth_is_of_the_fastest() -> None:
    ours = [Timing(100, 1, 102, (1.0, 2.0, 9.0)), Timing(200, 1, 202, (2.0, 2.0, 2.0))]
    theirs = [Timing(200, 1, 202, (50.0, 60.0, 80.0))]
    ratio, growth, *_ = section({OURS: ours, THEIRS: theirs}, {}).claims
    assert (ratio.found, ratio.spread, ratio.asked) == (30.0, (25.0, 40.0), "at least 20")
    assert (round(growth.found or 0, 6), growth.limit) == (1.0, 1.0)


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
    monkeypatch.setattr(planning, "one_rank", no_group)
    return found


def test_deep_models_are_timed_with_ddpopt_alone(asked_for: list[tuple[int, str]], tmp_path: Path) -> None:
    kept = tmp_path / "planning.json"
    words = ["--layers", "20,10", "--deep", "90,20", "--repeat", "2", "--json", str(kept)]
    assert main(words) == 0
    one_round = [(10, OURS), (10, THEIRS), (20, OURS), (20, THEIRS), (90, OURS)]
    assert asked_for == [(2, OURS), (2, THEIRS), *one_round, *one_round]
    found = json.loads(kept.read_text())["figures"]
    measured = {name: [(one["layers"], len(one["seconds"])) for one in found[name]] for name in found}
    assert measured == {OURS: [(10, 2), (20, 2), (90, 2)], THEIRS: [(10, 2), (20, 2)]}
    main(["--layers", "20", "--deep", "none", "--repeat", "1"])
    assert {layers for layers, _ in asked_for[12:]} == {2, 20}
