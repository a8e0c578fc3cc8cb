"""Tests of `benchmarks.compile`: what falls short."""

import pytest

from benchmarks.compile import Setting, Starts, section
from benchmarks.compile_once import Start


def starts(cold_s: float, anew: int) -> Starts:
    cold = (Start(cold_s, cold_s, 8, 0),) * 2
    return Starts(cold, cold, (Start(1.0, 1.0, 0, 8), Start(1.0, 1.0, anew, 8)))


def short(found: dict[Setting, Starts]) -> dict[str, float]:
    """What was measured and is not as asked."""
    claims = section(found, {}).claims
    return {f"{c.case}: {c.what}": c.found for c in claims if c.found is not None and not c.held}


@pytest.mark.parametrize(("mode", "told"), [("split", True), ("inline", True), ("torch", False)])
def test_a_warm_start_of_ours_compiles_nothing(mode: str, told: bool) -> None:
    found = {Setting("resnet", 12, mode): starts(1.0, anew=2)}
    assert short(found) == ({f"resnet, all depths: {mode}: compiled in a warm start": 2} if told else {})
