"""A verification from start to end, as a command runs it: trials, the search for what is wrong, reports.

Invariant: every verdict is reported, whatever becomes of the search; on rank 0 alone under torchrun.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace

from ddpopt.judge.verdict import Location, Status, Trial, Verdict
from ddpopt.ranks.group import joined, under_torchrun


def verify_and_locate(
    verify: Callable[[], Verdict],
    locate: Callable[[Trial, int], Location] | None,
    report: Callable[[Verdict], None],
) -> Verdict:
    """Verify, look where the first wrong trial goes wrong, and report.

    Args:
        verify: gives the verdict.
        locate: looks where a trial goes wrong, on so many ranks. None to look nowhere.
        report: writes what was found.

    Returns:
        The verdict.

    Raises:
        UsageError: an argument cannot be used.
        InfrastructureError: no ranks could be had.
    """
    with _one_group() as meet:
        verdict = verify()
        trial = to_locate(verdict)
        if locate is not None and trial is not None:
            try:
                location = locate(trial, verdict.world_size)
            except Exception as error:  # whatever becomes of the search, there is a verdict
                location = Location((), "none was found: the search failed", note=str(error))
            verdict = replace(verdict, location=location)
        if is_first():
            report(verdict)
        meet()
    return verdict


@contextlib.contextmanager
def _one_group() -> Iterator[Callable[[], object]]:
    """Under torchrun, one process group for all that follows; yields what has its ranks wait for each other.

    Torchrun ends all ranks when one ends with another exit code than 0, so none may leave early.
    """
    if not under_torchrun():
        yield lambda: None
        return
    with joined() as ranks:
        yield lambda: ranks.gather(None)


def to_locate(verdict: Verdict) -> Trial | None:
    """The first trial that is wrong, or, if none is, the first that took its ranks down."""
    wrong = [trial for trial in verdict.trials if trial.status is Status.WRONG]
    broken = [trial for trial in verdict.trials if trial.status is Status.BROKEN]
    tried = [trial for trial in broken if not trial.reason.startswith("not tried")]
    return next(iter([*wrong, *tried]), None)


def is_first() -> bool:
    """Whether this process writes the reports: under torchrun, rank 0 alone does.

    Other launchers set ``RANK`` too, for processes that each start ranks of their own here.
    """
    return not under_torchrun() or os.environ["RANK"] == "0"
