"""Tests of `benchmarks.step_rows`: limit, ratios, what falls short."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.step_modes import MODES
from benchmarks.step_rank import Figures
from benchmarks.step_rows import claims, limit, rows

COMPUTING = {"forward": 2.0, "backward": 4.0, "update": 1.0}
PARTS = {**COMPUTING, "first_bucket": 0.25, "comm": 9.0, "last_bucket": 1.5}
"""A step of at least 13 seconds."""


def figures(**steps_s: list[float]) -> Figures:
    samples = len(next(iter(steps_s.values())))
    return Figures(
        model="linears",
        bucket_bytes=[4 * 2**20] * 8,
        graphs={},
        steps_s=steps_s,
        parts={name: [value] * samples for name, value in PARTS.items()},
        exposed={mode: [0.25] for mode in steps_s},
        peak_bytes=dict.fromkeys(steps_s, 2 * 2**20),
    )


def short(found: Figures) -> list[tuple[str, str, str]]:
    return [(c.what, f"{c.found:.3f}", f"{c.limit:.3f}") for c in claims("gpt", rows(found)) if not c.held]


def test_a_slow_network_never_rests_and_a_fast_one_has_only_the_last_bucket_left_after_the_backward() -> None:
    assert limit(PARTS) == 2 + 0.25 * 4 + 9 + 1
    assert limit({**PARTS, "comm": 4.0}) == 2 + 4 + 1.5 + 1


def test_ratios_are_of_the_fastest_steps_and_the_spread_is_over_all() -> None:
    eager, inline = rows(figures(eager=[40.0, 20.0], inline=[15.0, 100.0]))
    assert (inline.to_limit, inline.to_best, eager.to_best) == (15 / 13, 0.75, 20 / 15)
    (row,) = rows(figures(whole=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert (row.fastest_s, row.step_s, row.spread_s) == (1.0, 3.5, (2.25, 4.75))


@pytest.mark.parametrize(
    ("steps_s", "expected"),
    [
        ({"inline": 13.6}, []),
        ({}, [("inline to the limit", "1.077", "1.000")]),  # and no other mode is asked to be near it
        ({"inline": 13.0, "step": 13.1}, [("step to inline", "1.008", "1.000")]),
        ({"split": 13.0, "inline": 13.3, "step": 12.0}, [("inline to the best other", "1.023", "1.000")]),
    ],
)
def test_inline_is_near_its_limit_and_the_best_mode(steps_s: dict[str, float], expected: list[Any]) -> None:
    steps_s = {**dict.fromkeys(MODES, 14.0), "step": steps_s.get("inline", 14.0), **steps_s}
    assert short(figures(**{mode: [each] * 2 for mode, each in steps_s.items()})) == expected


@pytest.mark.parametrize(("graphs", "judged"), [(1, True), (2, False)])
def test_only_where_torch_compiles_one_graph_inline_is_to_be_faster(graphs: int, judged: bool) -> None:
    found = replace(figures(torch=[14.9, 20.0], inline=[13.0, 13.0]), graphs={"whole": 1, "torch": graphs})
    assert short(found) == ([("torch's, one graph, to inline", "1.146", "1.146")] if judged else [])
