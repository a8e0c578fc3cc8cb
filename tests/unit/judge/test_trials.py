"""What each rank does in a verification, as far as it needs no ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddpopt.judge.judging.failing import Failure
from ddpopt.judge.trials import _of_eager
from ddpopt.judge.verdict import Status

RAISED = Failure(1, "ValueError: no", refused=False, lost=False)
WAITED = Failure(0, "RuntimeError: Timed out", refused=False, lost=True)


@pytest.mark.parametrize(
    ("waited", "failures", "status", "reason"),
    [
        ("all waited", [], Status.BROKEN, "eager DDP's own runs did not finish: all waited"),
        ("", [WAITED, RAISED], Status.NOT_POSSIBLE, "eager DDP itself fails here: ValueError: no"),
    ],
)
def test_where_eager_ddp_raises_a_trial_is_not_possible_and_where_it_only_waited_broken(
    waited: str, failures: list[Failure], status: Status, reason: str
) -> None:
    bench: Any = SimpleNamespace(stalled=waited, failures=failures)
    assert _of_eager(bench) == ({"status": status} if failures else {}) | {"reason": reason}
