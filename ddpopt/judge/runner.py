"""Verification from end to end: which trials, on which ranks, and the verdict.

Trials run in ranks that this process starts, or in torchrun's. Invariant: every trial asked for is in the
verdict, and every verdict is reported, whatever becomes of the search for what is wrong.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

import ddpopt
from ddpopt.cases.case import Case
from ddpopt.cases.targets import resolve
from ddpopt.dynamo.backend import find_compiler
from ddpopt.errors import UsageError
from ddpopt.explanation.rehearsal import generators_kept
from ddpopt.judge.modes import mode, mode_of
from ddpopt.judge.options import option
from ddpopt.judge.trials import (
    STEPS,
    TRIAL_LIMIT_S,
    Asked,
    Ended,
    Settings,
    Started,
    hardware,
    on_rank,
    run_trials,
    untried,
)
from ddpopt.judge.verdict import Finding, Location, Status, Trial, Verdict
from ddpopt.ranks.failures import RanksFailed
from ddpopt.ranks.group import COLLECTIVE_LIMIT_S, joined, under_torchrun
from ddpopt.ranks.pool import launch

RUN_LIMIT_S = 3600.0
OPTIONS_BY_DEFAULT = ("default",)
Progress = Callable[[object], None]
"""Told of each `Started` and `Ended`."""


def verify(  # noqa: PLR0913  # one for each thing that a user may choose
    target: str | Case | Callable[[], object],
    *,
    nproc: int = 2,
    strategy: str = "auto",
    backend: Any = "inductor",
    mode: str | Sequence[str] | None = None,
    options: str | Sequence[str] = OPTIONS_BY_DEFAULT,
    steps: int = STEPS,
    dtype: str | None = None,
    device: str | None = None,
    limit_s: float = RUN_LIMIT_S,
    trial_limit_s: float = TRIAL_LIMIT_S,
    on_event: Progress | None = None,
) -> Verdict:
    """Verify that a compiled data-parallel step computes what eager DDP computes.

    Under torchrun the ranks that exist are used, and every rank must call this; else ranks are started on
    this machine.

    Args:
        target: a `ddpopt.testing.Case`, a factory of a case, ``"package.module:name"`` of either, or the
            name of a case in the corpus.
        nproc: how many ranks to start.
        strategy: ddpopt's, where no mode is given: ``"split"``, ``"inline"`` or ``"auto"``.
        backend: of Dynamo, underneath: a name, or a callable ``(gm, example_inputs)``.
        mode: the modes to judge, by name (see ``ddpopt.judge.modes``); by default ddpopt's.
        options: the ways to use DDP, by name (see ``ddpopt.judge.options``).
        steps: how many steps of training; DDP has settled by the third.
        dtype: ``"float32"``, ``"float64"``, ``"bfloat16"``, …: to compute in; by default the case's own.
        device: ``"cpu"`` or ``"cuda"``; by default a GPU for each rank where there are enough.
        limit_s: of the whole run, in seconds.
        trial_limit_s: of each trial, and of eager's runs under each option, in seconds. A trial compiles, and
            to judge compiled arithmetic it runs eager several times.
        on_event: called for each trial as it begins and ends.

    Returns:
        The verdict: true if everything is right. What is wrong is in its findings, with level, parameter,
        bucket, rank and step.

    Raises:
        UsageError: an argument cannot be used, or the target does not run in eager at all.
        InfrastructureError: no ranks could be had.
    """
    modes = _names(mode) or (mode_of(strategy),)
    settings = Settings(backend, steps, dtype, trial_limit_s)
    case = resolve(target)
    travelling = target if isinstance(target, str) else case
    asked = [Asked(travelling, name, modes) for name in _names(options)]
    checked(asked, settings, nproc)
    return verify_all(
        case.name, asked, settings, nproc=nproc, device=device, limit_s=limit_s, on_event=on_event
    )


def verify_all(
    title: str,
    asked: Sequence[Asked],
    settings: Settings,
    *,
    nproc: int,
    device: str | None = None,
    limit_s: float = RUN_LIMIT_S,
    on_event: Progress | None = None,
) -> Verdict:
    """Verify several cases, options and modes in one run.

    Args:
        title: what the verdict is about.
        asked: what to verify.
        settings: for all of it.
        nproc: how many ranks to start; under torchrun, its ranks are used.
        device: as for `verify`.
        limit_s: of the whole run, in seconds.
        on_event: as for `verify`.

    Returns:
        The verdict, with a trial for everything that was asked.
    """
    if under_torchrun():
        with (
            joined(on_event=on_event or (lambda _: None), timeout_s=_waits_s(settings)) as ranks,
            ranks.limited(limit_s, f"verifying {title}"),
        ):
            return _verdict(title, ranks.size, run_trials(ranks, asked, settings), hardware(ranks.device))
    attempts = Attempts(asked, settings, on_event or (lambda _: None))
    trials = attempts.run(nproc, limit_s, device)
    return _verdict(title, nproc, trials, attempts.device)


class Attempts:
    """What was asked for, and what is known of it so far.

    Attributes:
        trials: all that were asked for, each as it is when nothing was learned from it, or as it ended.
        done: indices of those that have ended or were given up.
        device: what the ranks compute on; empty until they have said so.
    """

    def __init__(self, asked: Sequence[Asked], settings: Settings, tell: Progress) -> None:
        self.trials = list(untried(asked, settings))
        self.done: set[int] = set()
        self.device = ""
        self._task = (on_rank, asked, settings)
        self._tell = tell
        self._running: Started | None = None

    def run(self, nproc: int, limit_s: float, device: str | None) -> tuple[Trial, ...]:
        """Judge everything.

        Args:
            nproc: how many ranks to start.
            limit_s: of the whole run, in seconds.
            device: for `ddpopt.ranks.pool.launch`.

        Returns:
            A trial for everything that was asked.

        Raises:
            RanksFailed: ranks failed before any trial had begun.
            InfrastructureError: no ranks could be had.
        """
        deadline = time.monotonic() + limit_s
        while left := [index for index in range(len(self.trials)) if index not in self.done]:
            left_s = deadline - time.monotonic()
            if self.done and left_s <= 0:
                passed = f"not tried: the limit of the whole run, {limit_s:g} s, had passed"
                self._end(left, reason=f"{passed}. Raise it, or ask for less.")
                break
            task = (*self._task, tuple(sorted(self.done)))
            try:
                launch(*task, nproc=nproc, limit_s=left_s, device=device, on_event=self._note)
            except RanksFailed as failed:
                if self._running is not None:
                    self._lose(self._running, failed)
                elif not self.done or time.monotonic() < deadline:
                    raise
        return tuple(self.trials)

    def _lose(self, began: Started, failed: RanksFailed) -> None:
        """Give up what a failure of the ranks took with it.

        If it was eager DDP itself that ran, those are all modes of that case under that option; else the
        trial that ran, and unless it only raised, the same mode under the same option on later cases.
        """
        case, one = began.case, [began.index]
        if not began.mode:
            status = Status.BROKEN if failed.of_time_alone else Status.NOT_POSSIBLE
            reason = f"eager DDP itself fails here, on {case}: {failed}"
            self._end(self._left("case", "option", began.index), case=case, status=status, reason=reason)
        elif failed.exit_code == 1:
            finding = Finding("run", "the step runs", str(failed), rank=failed.culprits[0].rank)
            self._end(one, case=case, status=Status.WRONG, findings=(finding,))
        else:
            self._end(one, case=case, reason=str(failed))
            reason = f"not tried again: it took the ranks down on {case}"
            self._end(self._left("option", "mode", began.index), reason=reason)

    def _left(self, first: str, second: str, like: int) -> list[int]:
        """What is yet to be judged and agrees with a trial in two fields."""
        of = attrgetter(first, second)
        return [
            index
            for index, trial in enumerate(self.trials)
            if index not in self.done and of(trial) == of(self.trials[like])
        ]

    def _end(self, indices: Iterable[int], **known: Any) -> None:
        for index in indices:
            self._note(Ended(index, replace(self.trials[index], **known)))

    def _note(self, event: object) -> None:
        if isinstance(event, str):
            self.device = event
        elif isinstance(event, (Started, Ended)):
            self._running = event if isinstance(event, Started) else None
            if isinstance(event, Ended):
                self.trials[event.index] = event.trial
                self.done.add(event.index)
            self._tell(event)


def verify_here(
    case: Case,
    *,
    mode: str | None = None,
    strategy: str = "auto",
    backend: Any = "aot_eager",
    options: Sequence[str] = OPTIONS_BY_DEFAULT,
    steps: int = STEPS,
    trial_limit_s: float = TRIAL_LIMIT_S,
) -> Verdict:
    """Verify a case on the ranks of the default process group; a collective of all of them.

    Args:
        case: the case.
        mode: a single mode; by default ddpopt's.
        strategy: as for `verify`.
        backend: as for `verify`.
        options: as for `verify`.
        steps: as for `verify`.
        trial_limit_s: as for `verify`; at the limit this process ends.

    Returns:
        The verdict, the same on every rank.

    Raises:
        UsageError: an argument cannot be used.
    """
    modes = (mode,) if mode else (mode_of(strategy),)
    asked = [Asked(case, name, modes) for name in options]
    settings = Settings(backend, steps, trial_limit_s=trial_limit_s)
    with generators_kept(), joined(timeout_s=_waits_s(settings)) as ranks:
        checked(asked, settings, ranks.size)
        return _verdict(case.name, ranks.size, run_trials(ranks, asked, settings), hardware(ranks.device))


def verify_and_locate(
    verify: Callable[[], Verdict],
    locate: Callable[[Trial, int], Location] | None,
    report: Callable[[Verdict], None],
) -> Verdict:
    """Verify, look where the first wrong trial goes wrong, and report: as a command does, on rank 0 alone.

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
    with joined() if under_torchrun() else nullcontext() as ranks:  # one process group for all of it
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
        if ranks is not None:
            ranks.gather(None)  # torchrun ends all ranks when one ends with another exit code than 0
    return verdict


def to_locate(verdict: Verdict) -> Trial | None:
    """The first trial that is wrong, or, if none is, the first that took its ranks down."""
    candidates = (
        trial
        for status in (Status.WRONG, Status.BROKEN)
        for trial in verdict.trials
        if trial.status is status and not trial.reason.startswith("not tried")
    )
    return next(candidates, None)


def is_first() -> bool:
    """Whether this process writes the reports: under torchrun, rank 0 alone does.

    Other launchers set ``RANK`` too, for processes that each start ranks of their own here.
    """
    return not under_torchrun() or os.environ["RANK"] == "0"


def _waits_s(settings: Settings) -> float:
    """How long ranks that exist wait for each other between trials: a trial's own limit passes before."""
    return max(COLLECTIVE_LIMIT_S, settings.trial_limit_s)


def _verdict(title: str, size: int, trials: Iterable[Trial], device: str) -> Verdict:
    environment = {
        "ddpopt": ddpopt.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
    }
    return Verdict(title, size, tuple(trials), environment)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def checked(asked: Sequence[Asked], settings: Settings, nproc: int) -> None:
    """Look up every name before a rank is started.

    Args:
        asked: what to verify.
        settings: for all of it.
        nproc: how many ranks to start.

    Raises:
        UsageError: a mode, an option, a backend, a dtype or a number cannot be used.
    """
    dtype = torch.float32 if settings.dtype is None else getattr(torch, settings.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            "dtype: expected a floating-point dtype of torch's, like float32 or bfloat16, got "
            f"{settings.dtype!r}"
        )
    find_compiler(settings.backend)
    for one in asked:
        option(one.option)
        for name in one.modes:
            mode(name)
    for what, number in (("nproc", nproc), ("steps", settings.steps)):
        if number < 1:
            raise UsageError(f"{what}: expected a positive number, got {number!r}")
    if not settings.trial_limit_s > 0:
        raise UsageError(f"trial_limit_s: expected seconds above 0, got {settings.trial_limit_s!r}")
