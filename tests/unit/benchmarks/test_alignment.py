"""Tests of `benchmarks.alignment_rows` and of the arguments in `benchmarks.alignment_run`."""

import pytest

from benchmarks.alignment_rows import row
from benchmarks.alignment_run import Buckets, Outcome
from ddpopt.gate.overlap import BucketLaunch, Measurement

PLANNED: Buckets = (("b",), ("a",))


def measurement(potential: float, *buckets: Buckets) -> Measurement:
    seen = [tuple(BucketLaunch(params, 4, 0) for params in each) for each in buckets or (PLANNED,)]
    return Measurement(potential, 100, tuple(seen))


GOOD = Outcome(measurement(0.5, PLANNED, PLANNED), 3, PLANNED)
LATE = Outcome(measurement(0.48), 3, PLANNED)
OTHER = Outcome(measurement(0.5, PLANNED, (("b", "a"),)), 3, PLANNED)
CRASHED = Outcome(None, crash="KeyError", message="'x'")


@pytest.mark.parametrize(
    ("answers", "ratio", "problems"),
    [
        ([Outcome(measurement(0.495), 3, PLANNED)], 0.99, ()),
        ([GOOD, LATE], 0.96, ("rank 1, ratio 0.9600 is below 0.98",)),
        ([GOOD, OTHER], 1.0, ("rank 1, iteration 1, bucket 0: planned b, observed b a",)),
        ([GOOD, CRASHED], None, ("crash: KeyError: 'x'",)),
    ],
)
def test_the_slowest_rank_counts_and_less_than_98_percent_other_buckets_or_a_crash_are_problems(
    answers: list[Outcome], ratio: float | None, problems: tuple[str, ...]
) -> None:
    eager = [Outcome(measurement(0.5)) for _ in answers]
    cell = row("gpt", "1", {"eager": eager, "split": answers}).cells["split"]
    assert (cell.ratio, cell.problems) == (ratio, problems)
