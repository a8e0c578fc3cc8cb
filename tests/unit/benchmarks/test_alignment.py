"""Tests of `benchmarks.alignment_rows` and of the arguments in `benchmarks.alignment_run`."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.alignment_rows import Cell, Row, difference, row, section
from benchmarks.alignment_run import Buckets, Outcome, caps_of, ddp_arguments
from ddpopt.gate.overlap import BucketLaunch, Measurement
from ddpopt.testing import Case

PLANNED: Buckets = (("b",), ("a",))


def measurement(potential: float, *buckets: Buckets) -> Measurement:
    seen = tuple(
        tuple(BucketLaunch(params, 4, 0) for params in iteration) for iteration in buckets or (PLANNED,)
    )
    return Measurement(potential, 100, seen)


def split_cell(*answers: Outcome, eager: float = 0.5) -> Cell:
    base = [Outcome(measurement(eager)) for _ in answers]
    return row("gpt", "1", {"eager": base, "split": answers}).cells["split"]


def case(**ddp_kwargs: Any) -> Case:
    return Case(
        "c", lambda: nn.Linear(1, 1), lambda *_: ((torch.ones(1),), {}), "about", ddp_kwargs=ddp_kwargs
    )


def test_a_run_that_keeps_potential_and_plan_has_no_problem() -> None:
    cell = split_cell(Outcome(measurement(0.495, PLANNED, PLANNED), 3, PLANNED))
    assert cell == Cell(ratio=0.99, segments=3, buckets=2, planned=2)


def test_less_than_98_percent_is_a_problem() -> None:
    cell = split_cell(Outcome(measurement(0.48), 3, PLANNED))
    assert cell.problems == ("rank 0, ratio 0.9600 is below 0.98",)


def test_the_slowest_rank_counts() -> None:
    good, bad = Outcome(measurement(0.5), 3, PLANNED), Outcome(measurement(0.25), 3, PLANNED)
    cell = split_cell(good, bad)
    assert (cell.ratio, cell.problems) == (0.5, ("rank 1, ratio 0.5000 is below 0.98",))


def test_an_iteration_with_other_buckets_is_a_problem() -> None:
    seen = measurement(0.5, PLANNED, (("b", "a"),))
    cell = split_cell(Outcome(measurement(0.5), 3, PLANNED), Outcome(seen, 3, PLANNED))
    assert cell.problems == ("rank 1, iteration 1, bucket 0: planned b, observed b a",)


def test_a_missing_bucket_is_a_difference() -> None:
    assert difference(PLANNED, [(("b",),)]) == "iteration 0, bucket 1: planned a, observed none"


def test_a_different_order_within_a_bucket_is_a_difference() -> None:
    assert difference((("a", "b"),), [(("b", "a"),)]) == "iteration 0, bucket 0: planned a b, observed b a"


def test_no_plan_is_right_only_for_a_single_bucket() -> None:
    assert difference(None, [(("a", "b"),)]) == ""
    assert difference(None, [(("a", "b"),), PLANNED]) == "iteration 1: no plan was imposed on several buckets"


def test_a_crash_is_a_problem_whatever_else_was_seen() -> None:
    cell = split_cell(Outcome(measurement(0.5), 3, PLANNED), Outcome(None, crash="KeyError", message="'x'"))
    assert cell.problems == ("crash: KeyError: 'x'",)
    assert cell.ratio is None


def test_torchs_own_modes_are_only_reported() -> None:
    answers = {"eager": [Outcome(measurement(0.5))], "torch": [Outcome(None, crash="AssertionError")]}
    cell = row("gpt", "1", answers).cells["torch"]
    assert (cell.crash, cell.problems) == ("AssertionError", ())


def test_where_eager_fails_ddpopt_proves_nothing() -> None:
    answers = {
        "eager": [Outcome(None, crash="ValueError", message="no")],
        "split": [Outcome(measurement(0.5), 3, PLANNED)],
    }
    found = row("gpt", "1", answers)
    assert (found.eager, found.eager_failure) == (None, "ValueError: no")
    assert found.cells["split"].problems == ("eager DDP failed, so there is nothing to compare with",)


def test_one_run_with_too_little_overlap_is_enough_to_fail_and_a_mode_without_runs_is_not_measured() -> None:
    cells = (Cell(ratio=1.0), Cell(ratio=0.5, problems=("low",)), Cell(crash="KeyError", problems=("crash",)))
    found = section([Row("gpt", "1", 0.5, "", 100, {"split": cell}) for cell in cells], {})
    assert [(c.found, c.spread, c.held, c.remark) for c in found.claims] == [
        (0.5, (0.5, 1.0), False, ""),
        (2, None, False, ""),
        (None, None, False, "not measured"),
        (None, None, False, "not measured"),
    ]
    assert found.grids[0].rows == (("split", "0.750", "0.500", "1 of 3", "1"),)


def test_a_cap_takes_the_place_of_the_cases_own() -> None:
    limited = case(bucket_cap_mb_list=[3, 1], static_graph=True)
    assert ddp_arguments(limited, "0.3") == {"static_graph": True, "bucket_cap_mb": 0.3}
    assert ddp_arguments(limited, "default") == {"static_graph": True}
    assert ddp_arguments(limited, "own") == limited.ddp_kwargs


@pytest.mark.parametrize(("own", "expected"), [({"bucket_cap_mb": 4}, ("1", "own")), ({}, ("1",))])
def test_only_a_case_that_sets_a_cap_keeps_it(own: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert caps_of(case(**own), ("1",)) == expected
