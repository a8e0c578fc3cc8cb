"""What a failure of the ranks takes from a verification, and what is not tried again after it.

Invariant: every trial that is given up has a status and a reason; every other one is still to be judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpopt.judge.modes import mode
from ddpopt.judge.trials import Asked, Settings, Started
from ddpopt.judge.verdict import Finding, Status, Trial
from ddpopt.ranks.failures import RanksFailed

__all__ = ["lost_trials", "stopped", "too_late"]


def lost_trials(
    asked: Sequence[Asked], settings: Settings, began: Started, failed: RanksFailed
) -> dict[int, Trial]:
    """Tell which trials a failure of the ranks took with it.

    If it was eager DDP itself that ran, those are all modes of that case under that option; else the trial
    that ran, and the same mode under the same option on the cases after it, which are not tried again.

    Args:
        asked: all that is to be verified.
        settings: for all of it.
        began: what ran.
        failed: how the ranks failed.

    Returns:
        A trial for the index of each that is given up.
    """
    lost = _lost_with_mode if began.mode else _lost_with_eager
    return dict(lost(list(_flat(asked, settings)), began, failed))


def too_late(
    asked: Sequence[Asked], settings: Settings, done: Sequence[int], limit_s: float
) -> dict[int, Trial]:
    """Give up what a run's limit left no time for.

    Args:
        asked: all that is to be verified.
        settings: for all of it.
        done: indices of what has been judged, or given up.
        limit_s: of the whole run, in seconds.

    Returns:
        A trial for the index of each other one.
    """
    reason = f"not tried: the limit of the whole run, {limit_s:g} s, had passed. Raise it, or ask for less."
    return {
        index: replace(trial, reason=reason)
        for index, trial in enumerate(_flat(asked, settings))
        if index not in done
    }


def stopped(
    asked: Sequence[Asked], settings: Settings, began: Started, failed: RanksFailed
) -> dict[int, Trial]:
    """Tell of the trial in which a run's limit passed.

    Args:
        asked: all that is to be verified.
        settings: for all of it.
        began: what ran.
        failed: where the ranks were then.

    Returns:
        That trial, by its index.
    """
    trial = list(_flat(asked, settings))[began.index]
    reason = f"the limit of the whole run passed meanwhile: {failed}"
    return {began.index: replace(trial, case=began.case, reason=reason)}


def _flat(asked: Sequence[Asked], settings: Settings) -> Iterator[Trial]:
    """Every trial that is asked for, as it is when nothing was learned from it."""
    backend = getattr(settings.backend, "__name__", str(settings.backend))
    for one in asked:
        case = one.target if isinstance(one.target, str) else one.target.name
        for name in one.modes:
            compiler = backend if mode(name).compiles else ""
            yield Trial(case, name, one.option, compiler, Status.BROKEN)


def _lost_with_eager(
    trials: Sequence[Trial], began: Started, failed: RanksFailed
) -> Iterator[tuple[int, Trial]]:
    status, reason = Status.NOT_POSSIBLE, f"eager DDP itself fails here, on {began.case}: {_in_short(failed)}"
    if failed.of_time_alone:
        told = f"eager DDP did not come to an end, on {began.case}: {_in_short(failed)}"
        status, reason = Status.BROKEN, f"{told}. If it is only slow, raise --timeout."
    own = trials[began.index]
    for index, trial in enumerate(trials):
        if (trial.case, trial.option) == (own.case, own.option) and index >= began.index:
            yield index, replace(trial, status=status, backend="", reason=reason)


def _lost_with_mode(
    trials: Sequence[Trial], began: Started, failed: RanksFailed
) -> Iterator[tuple[int, Trial]]:
    own = replace(trials[began.index], case=began.case)
    if failed.exit_code == 1:
        finding = Finding("run", "the step runs", str(failed), rank=failed.culprits[0].rank)
        yield began.index, replace(own, status=Status.WRONG, findings=(finding,))
        return
    yield began.index, replace(own, reason=str(failed))
    reason = f"not tried again: on {began.case} {_in_short(failed)}"
    for index, trial in enumerate(trials):
        if (trial.option, trial.mode) == (began.option, began.mode) and index > began.index:
            yield index, replace(trial, reason=reason)


def _in_short(failed: RanksFailed) -> str:
    """One line about ranks that failed, without their stacks."""
    one = failed.culprits[0]
    if one.kind == "raised":
        return f"rank {one.rank} raised {one.stack.strip().rpartition(chr(10))[2]}"
    how = f"{one.kind} ({one.signal})" if one.signal else one.kind
    crashed = one.stack.partition("Current thread")[2] or one.stack  # of several, the one that did it
    frames = [line.strip() for line in crashed.splitlines() if line.strip().startswith("File ")]
    where = f", in {frames[0].rpartition('/')[2]}" if frames else ""
    return f"rank {one.rank} {how}{where}"
