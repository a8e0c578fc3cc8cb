"""The end of a simulated trial before its last step, and the fields that the trial has then.

Invariant: what fails in eager never counts against a mode, nor what fails in the judge against either.
"""

from typing import Any

from ddpopt.judge.rules.failing import Failure, failure_of
from ddpopt.judge.rules.outcome import JUDGE_FAILED, failed
from ddpopt.judge.verdict import Status


class EndedEarlyError(Exception):
    """The trial has ended.

    Attributes:
        fields: those of the trial.
    """

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.fields = fields


def eager_fails(rank: int, error: Exception) -> EndedEarlyError:
    """Eager DDP itself fails on every rank."""
    return eager_failed(failure_of(rank, error))


def eager_failed(failure: Failure) -> EndedEarlyError:
    """The same, of a failure that was seen before."""
    if failure.of_judge:
        return EndedEarlyError(status=Status.BROKEN, reason=f"{JUDGE_FAILED}: {failure.text}")
    reason = f"eager DDP itself fails here: {failure.text}"
    return EndedEarlyError(status=Status.NOT_POSSIBLE, reason=reason)


def mode_fails(rank: int, error: Exception) -> EndedEarlyError:
    """The mode fails on a rank, where eager DDP does not."""
    return EndedEarlyError(**failed([failure_of(rank, error)]))
