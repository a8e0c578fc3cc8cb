"""Tests of the pure parts of `benchmarks.compile`: ratios, growth, what falls short, arguments."""

import subprocess
from typing import Any

import pytest

from benchmarks import compile as compiling
from benchmarks.compile import (
    Setting,
    Starts,
    heats,
    main,
    measure,
    ratio,
    ratios,
    section,
    start_once,
)
from benchmarks.compile_once import Start
from ddpopt.errors import InfrastructureError


def starts(cold_s: float, anew: int = 0, slower_s: float = 0.0) -> Starts:
    cold = tuple(Start(seconds, seconds, 8, 0) for seconds in (cold_s + slower_s, cold_s))
    return Starts(cold, cold, (Start(1.0, 1.0, 0, 8), Start(1.0, 1.0, anew, 8)))


def figures(layers: int = 24, model: str = "gpt", **cold_s: float) -> dict[Setting, Starts]:
    return {Setting(model, layers, mode): starts(seconds) for mode, seconds in cold_s.items()}


def test_a_ratio_is_the_median_of_rounds_at_the_same_depth_not_that_of_the_fastest() -> None:
    whole, inline = ([Start(seconds, 0.0, 2, 0) for seconds in column] for column in ((9, 20, 5), (9, 21, 9)))
    found = {
        Setting("gpt", 24, mode): Starts(tuple(column), tuple(column), ())
        for mode, column in (("whole", whole), ("inline", inline))
    }
    found |= figures(48, torch=10.0)
    assert ratios(found, Setting("gpt", 24, "inline"), "whole", "cold") == [1.0, 1.05, 1.8]
    assert ratio(found, Setting("gpt", 24, "inline"), "whole", "cold") == 1.05
    assert ratio(found, Setting("gpt", 24, "inline"), "torch", "cold") is None


def test_what_is_compared_starts_together_and_changes_places(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, int, bool]] = []

    def start(setting: Setting, _: str, processor: int, *, cached: bool) -> Start:
        started.append((setting.mode, processor, cached))
        return Start(1.0, 1.0, 2, 0)

    monkeypatch.setattr(compiling, "start_once", start)
    monkeypatch.setattr(compiling, "_processors", lambda: [4, 7, 9])
    settings = [Setting("gpt", 2, mode) for mode in ("whole", "torch", "split", "inline")]
    found = measure(settings, 2, lambda _: None)
    assert [*found] == settings
    assert {len(s.uncached) for s in found.values()} == {len(s.warm) for s in found.values()} == {2}
    uncached = [(mode, processor) for mode, processor, cached in started if not cached]
    first, second = [{*uncached[at : at + 2]} for at in (0, 2)], [{*uncached[at : at + 2]} for at in (4, 6)]
    assert first == [{("whole", 4), ("inline", 7)}, {("torch", 4), ("split", 7)}]
    assert second == [{("whole", 7), ("inline", 4)}, {("torch", 7), ("split", 4)}]


def short(found: dict[Setting, Starts]) -> dict[str, float]:
    """What was measured and is not as asked."""
    claims = section(found, {}).claims
    return {f"{c.case}: {c.what}": c.found for c in claims if c.found is not None and not c.held}


def test_what_is_asked_is_enough() -> None:
    deep = figures(48, whole=200.0, torch=900.0, split=62.0, inline=209.0)
    assert short({**figures(whole=100.0, torch=200.0, split=50.0, inline=105.0), **deep}) == {}
    settings = [Setting("gpt", 2, mode) for mode in ("whole", "inline")]
    assert heats(settings, 1) == [(settings[0],), (settings[1],)]  # on one processor all take turns


def test_whatever_falls_short_is_told() -> None:
    found = {**figures(whole=100.0, torch=200.0, split=51.0, inline=106.0), **figures(48, split=63.9)}
    assert short(found) == pytest.approx(
        {
            f"gpt, {what.format(kind)}": ratio
            for what, ratio in (
                ("24 layers: torch's {} start to split's", 200 / 51),
                ("24 layers: inline's {} start to one graph's", 1.06),
                ("24 to 48 layers: growth of split's {} start", 63.9 / 51),
            )
            for kind in ("uncached", "cold")
        }
    )


@pytest.mark.parametrize(("mode", "told"), [("split", True), ("inline", True), ("torch", False)])
def test_a_warm_start_of_ours_compiles_nothing(mode: str, told: bool) -> None:
    found = {Setting("resnet", 12, mode): starts(1.0, anew=2)}
    assert short(found) == ({f"resnet, all depths: {mode}: compiled in a warm start": 2} if told else {})


def test_a_process_that_fails_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nValueError: no such thing")

    monkeypatch.setattr("subprocess.run", fail)
    with pytest.raises(InfrastructureError, match=r"gpt 2 split: exit code 1\.\nTraceback\nValueError"):
        start_once(Setting("gpt", 2, "split"), "caches", 0)
    assert main(["--models", "gpt", "--layers", "2", "--modes", "split"]) == 3
