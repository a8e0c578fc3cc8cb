"""Tests of `benchmarks.step_rows` and `benchmarks.step_table`: limit, ratios, what falls short, the table."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.step_modes import MODES
from benchmarks.step_rank import STEPS_A_TURN
from benchmarks.step_rows import asked_of, fastest_parts, limit, problems, rows
from benchmarks.step_table import parts_line, table
from benchmarks.step_workloads import WORKLOADS
from tests.unit.step_figures import PARTS, figures


def test_a_slow_network_starts_with_the_first_bucket_and_never_rests() -> None:
    assert limit(PARTS) == 2 + 0.25 * 4 + 9 + 1


def test_a_fast_network_has_only_the_last_bucket_left_when_the_backward_is_over() -> None:
    assert limit({**PARTS, "comm": 4.0}) == 2 + 4 + 1.5 + 1


def test_the_fastest_of_each_part_makes_the_limit_with_the_usual_share() -> None:
    found = figures(eager=[14.0] * 3 * STEPS_A_TURN)
    found.parts["comm"][1] = 12.0
    found.parts["backward"][0] = 40.0
    found.parts["first_bucket"][2] = 0.01
    assert fastest_parts(found) == PARTS


def test_ratios_are_of_the_fastest_steps() -> None:
    eager, torchs, inline = rows(
        figures(eager=[40.0, 20.0], torch=[30.0, 90.0], inline=[15.0, 100.0]),
    )
    assert (eager.to_eager, torchs.to_eager, inline.to_eager) == (1.0, 1.5, 0.75)
    assert (eager.to_torch, inline.to_torch) == (20 / 30, 0.5)
    assert inline.to_limit == 15 / 13


def test_the_spread_is_over_all_steps() -> None:
    (row,) = rows(figures(whole=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert (row.fastest_s, row.step_s, row.spread_s) == (1.0, 3.5, (2.25, 4.75))


def test_without_eager_and_torch_there_is_no_ratio_to_them() -> None:
    (row,) = rows(figures(inline=[13.0, 13.0]))
    assert (row.to_eager, row.to_torch, row.to_limit) == (None, None, 1.0)


def test_what_is_asked_is_enough() -> None:
    steps = {mode: [14.0, 14.0] for mode in MODES}
    assert problems("gpt", rows(figures(**{**steps, "inline": [13.6, 13.6]}))) == []


def test_inline_is_to_be_near_the_limit_and_no_other_mode_is() -> None:
    steps = {mode: [14.0, 14.0] for mode in MODES}
    assert problems("gpt", rows(figures(**steps))) == [
        "gpt: inline to the limit is 1.077, asked at most 1.05 (at the limit 1.000)"
    ]


def test_inline_is_to_be_about_as_fast_as_the_best_other_mode() -> None:
    steps = {**{mode: [14.0, 14.0] for mode in MODES}, "split": [13.0, 13.0], "inline": [13.3, 13.3]}
    assert problems("gpt", rows(figures(**steps))) == [
        "gpt: inline to the best other is 1.023, asked at most 1.02 (at the limit 1.000)"
    ]


@pytest.mark.parametrize(("graphs", "judged"), [(1, True), (2, False)])
def test_only_where_torch_compiles_one_graph_inline_is_to_be_faster(graphs: int, judged: bool) -> None:
    found = replace(figures(torch=[14.9, 20.0], inline=[13.0, 13.0]), graphs={"whole": 1, "torch": graphs})
    short = "linears: torch's, one graph, to inline is 1.146, asked at least 1.15 (at the limit 1.146)"
    assert problems("linears", rows(found)) == ([short] if judged else [])


def test_the_spread_of_a_ratio_is_that_of_its_numerator() -> None:
    found = figures(torch=[26.0, 26.0], inline=[13.0, 15.0, 17.0, 19.0, 21.0])
    to_limit, to_best = asked_of(rows(found))
    assert to_limit.spread == pytest.approx((15 / 13, 19 / 13))
    assert to_best.spread == pytest.approx((15 / 26, 19 / 26))
    one_graph = replace(
        figures(torch=[26.0, 28.0, 30.0, 32.0, 34.0], inline=[13.0, 20.0]), graphs={"torch": 1}
    )
    assert asked_of(rows(one_graph))[-1].spread == pytest.approx((28 / 13, 32 / 13))


def test_without_inline_nothing_is_asked() -> None:
    assert asked_of(rows(figures(eager=[99.0, 99.0]))) == []


def test_memory_is_beside_one_whole_graph_and_exposure_is_the_median() -> None:
    found = figures(whole=[13.0, 13.0], inline=[13.0, 13.0])
    found.peak_bytes["inline"] = 3 * 2**20
    found.exposed["inline"] = [0.9, 0.2, 0.1]
    whole, inline = rows(found)
    assert (whole.to_whole_peak, inline.to_whole_peak, inline.exposed) == (1.0, 1.5, 0.2)


def test_what_cannot_be_traced_is_not_known() -> None:
    (row,) = rows(replace(figures(inline=[13.0, 13.0]), exposed={}))
    assert row.exposed is None


def test_the_table_has_a_line_for_each_mode_and_says_what_is_not_known() -> None:
    found = replace(figures(torch=[0.34, 0.35], inline=[13.0, 13.0]), graphs={"torch": 9})
    console = Console(width=140, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(found, rows(found), "loopback"))
    shown = captured.get()
    torch_line, inline_line = (line for line in shown.splitlines() if line.startswith("│"))
    assert cells(torch_line) == [
        *("torch", "340", "345 (342–348)", "–", "1.000", "0.026", "9", "25 %", "2.0", "–", "3.0")
    ]
    assert cells(inline_line)[5:7] == ["1.000", "–"]
    assert f"{WORKLOADS['linears'].about}; loopback" in " ".join(shown.split())


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_the_parts_of_the_limit_are_told() -> None:
    assert parts_line(figures(inline=[0.3, 0.3])) == (
        "physical limit 13000 ms: forward 2000, backward 4000, first bucket after 25 % of it, "
        "all-reduce of 32.0 MiB in 8 buckets 9000, of the last one 1500, update 1000"
    )
