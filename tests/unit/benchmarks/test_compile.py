"""Tests of the pure parts of `benchmarks.compile`: ratios, growth, what falls short, arguments."""

import pytest

from benchmarks.compile import Setting, Starts, section
from benchmarks.compile_once import Start


def starts(cold_s: float, anew: int = 0, slower_s: float = 0.0) -> Starts:
    cold = tuple(Start(seconds, seconds, 8, 0) for seconds in (cold_s + slower_s, cold_s))
    return Starts(cold, cold, (Start(1.0, 1.0, 0, 8), Start(1.0, 1.0, anew, 8)))


def figures(layers: int = 24, model: str = "gpt", **cold_s: float) -> dict[Setting, Starts]:
    return {Setting(model, layers, mode): starts(seconds) for mode, seconds in cold_s.items()}


def short(found: dict[Setting, Starts]) -> dict[str, float]:
    """What was measured and is not as asked."""
    claims = section(found, {}).claims
    return {f"{c.case}: {c.what}": c.found for c in claims if c.found is not None and not c.held}


def test_what_is_asked_is_enough() -> None:
    deep = figures(48, whole=200.0, torch=900.0, split=62.0, inline=209.0)
    assert short({**figures(whole=100.0, torch=200.0, split=50.0, inline=105.0), **deep}) == {}


def test_every_shortfall_is_reported() -> None:
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
