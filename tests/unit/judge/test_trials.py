"""What each rank does in a verification, as far as it needs no ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddpopt.judge.judging.failing import Failure
from ddpopt.judge.matrix import CASES
from ddpopt.judge.trials import Settings, _impossible
from ddpopt.judge.verdict import Status


def bench_that_failed(stalled: str, *failures: Failure) -> Any:
    return SimpleNamespace(stalled=stalled, failures=list(failures))


def test_eager_runs_that_only_waited_for_each_other_leave_a_trial_broken() -> None:
    trial = _impossible(CASES[0], "join", "whole", bench_that_failed("all waited"))
    assert (trial.status, trial.reason) == (Status.BROKEN, "eager DDP's own runs did not end: all waited")


@pytest.mark.parametrize("others", [(), (Failure(0, "RuntimeError: Timed out", False, lost=True),)])
def test_where_eager_ddp_raises_a_trial_is_not_possible_and_the_culprit_is_told(
    others: tuple[Failure, ...],
) -> None:
    raised = Failure(1, "ValueError: no", refused=False, lost=False)
    trial = _impossible(CASES[0], "join", "whole", bench_that_failed("", *others, raised))
    assert (trial.status, trial.reason) == (
        Status.NOT_POSSIBLE,
        "eager DDP itself fails here: ValueError: no",
    )


def test_a_rank_may_wait_for_most_of_a_trial() -> None:
    assert Settings(trial_limit_s=1000).collective_limit_s == 800
