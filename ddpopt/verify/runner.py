"""Verification from end to end: which trials, on which ranks, and the verdict.

Trials run in ranks that this process starts, or in torchrun's. Where a rank dies or stalls, the trial that
ran is marked, and the others go on in new ranks. Invariant: every trial asked for is in the verdict.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import ddpopt
from ddpopt.backend import find_compiler
from ddpopt.errors import InfrastructureError, UsageError
from ddpopt.testing.case import Case, resolve
from ddpopt.verify.modes import mode, mode_of
from ddpopt.verify.options import option
from ddpopt.verify.rank_failures import RanksFailed
from ddpopt.verify.ranks import joined, launch, under_torchrun
from ddpopt.verify.trials import STEPS, Asked, Ended, Settings, Started, run_trials, run_trials_alone
from ddpopt.verify.verdict import Finding, Status, Trial, Verdict

RUN_LIMIT_S = 3600.0
OPTIONS_BY_DEFAULT = ("default",)


Progress = Callable[["Started | Ended"], None]


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
        mode: the modes to judge, by name (see ``ddpopt.verify.modes``); by default ddpopt's.
        options: the ways to use DDP, by name (see ``ddpopt.verify.options``).
        steps: how many steps of training; DDP has settled by the third.
        dtype: ``"float32"``, ``"float64"``, ``"bfloat16"``, …: to compute in; by default the case's own.
        device: ``"cpu"`` or ``"cuda"``; by default a GPU for each rank where there are enough.
        limit_s: of the whole run, in seconds.
        on_event: told of each trial as it begins and ends.

    Returns:
        The verdict: true if everything is right. What is wrong is in its findings, with level, parameter,
        bucket, rank and step.

    Raises:
        UsageError: an argument cannot be used, or the target does not run in eager at all.
        InfrastructureError: no ranks could be had.
    """
    modes = _names(mode) or (mode_of(strategy),)
    settings = Settings(backend, None if mode else strategy, steps, dtype)
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
    tell = on_event or _ignore
    if under_torchrun():
        with joined(on_event=lambda event: tell(event)) as ranks:  # type: ignore[arg-type]  # only ours
            trials = tuple(run_trials(ranks, asked, settings, ()))
            return _verdict(title, ranks.size, trials, str(ranks.device))
    done: dict[int, Trial] = {}
    running: list[Started] = []

    def note(event: Any) -> None:
        if isinstance(event, Ended):
            done[event.index] = event.trial
            running.clear()
        elif isinstance(event, Started):
            running[:] = [event]
        tell(event)

    wanted = sum(len(one.modes) for one in asked)
    while len(done) < wanted:
        before = len(done)
        try:
            launch(
                run_trials_alone,
                asked,
                settings,
                tuple(done),
                nproc=nproc,
                limit_s=limit_s,
                device=device,
                on_event=note,
            )
        except RanksFailed as failed:
            lost = lost_trials(asked, settings, running, failed)
            if not lost:
                raise
            for index, trial in lost.items():
                note(Ended(index, trial))
        if len(done) == before:
            raise InfrastructureError("the ranks ended without judging anything; this is a bug in ddpopt")
    return _verdict(title, nproc, tuple(done[index] for index in range(wanted)), device or "cpu")


def verify_here(
    case: Case,
    *,
    mode: str | None = None,
    strategy: str = "auto",
    backend: Any = "aot_eager",
    options: Sequence[str] = OPTIONS_BY_DEFAULT,
    steps: int = STEPS,
) -> Verdict:
    """Verify a case on the ranks of the default process group; a collective of all of them.

    Args:
        case: the case.
        mode: a single mode; by default ddpopt's.
        strategy: as for `verify`.
        backend: as for `verify`.
        options: as for `verify`.
        steps: as for `verify`.

    Returns:
        The verdict, the same on every rank.

    Raises:
        UsageError: an argument cannot be used.
    """
    modes = (mode,) if mode else (mode_of(strategy),)
    asked = [Asked(case, name, modes) for name in options]
    with joined() as ranks:
        settings = Settings(backend, None if mode else strategy, steps)
        checked(asked, settings, ranks.size)
        trials = run_trials(ranks, asked, settings, ())
        return _verdict(case.name, ranks.size, tuple(trials), str(ranks.device))


def _ignore(event: object) -> None:
    """Where nobody watches."""


# -------------------------------------------------------------------------------- in the starting process


def lost_trials(
    asked: Sequence[Asked], settings: Settings, running: Sequence[Started], failed: RanksFailed
) -> dict[int, Trial]:
    """The trials that a failure of the ranks took with it.

    That is the one that ran. What took a rank down on one case is not tried again on others: the same mode
    under the same option, or, if it was eager DDP itself, all modes.
    """
    if not running:
        return {}
    began = running[0]
    flat = [(one, name) for one in asked for name in one.modes]
    if not began.mode:
        reason = f"eager DDP itself fails here, on {began.case}: {_in_short(failed)}"
        return {
            index: Trial(_case_name(one), name, one.option, "", Status.NOT_POSSIBLE, reason)
            for index, (one, name) in enumerate(flat)
            if one.option == began.option and index >= began.index
        }
    backend = settings.backend if isinstance(settings.backend, str) else "custom"
    trial = Trial(began.case, began.mode, began.option, backend, Status.BROKEN, str(failed))
    if failed.exit_code == 1:
        finding = Finding("run", "the step runs", str(failed), rank=failed.culprits[0].rank)
        trial = replace(trial, status=Status.WRONG, reason="", findings=(finding,))
    later = {
        index: replace(
            trial, case=_case_name(one), reason=f"not tried again: on {began.case} {_in_short(failed)}"
        )
        for index, (one, name) in enumerate(flat)
        if (one.option, name) == (began.option, began.mode) and index > began.index
    }
    return {began.index: trial, **(later if trial.status is Status.BROKEN else {})}


def _in_short(failed: RanksFailed) -> str:
    """One line about ranks that died, without their stacks."""
    one = failed.culprits[0]
    how = f"{one.kind} ({one.signal})" if one.signal else one.kind
    frames = [line.strip() for line in one.stack.splitlines() if line.strip().startswith("File ")]
    where = f", in {frames[0].rpartition('/')[2]}" if frames else ""
    return f"rank {one.rank} {how}{where}"


def _case_name(asked: Asked) -> str:
    return asked.target if isinstance(asked.target, str) else asked.target.name


def _verdict(title: str, size: int, trials: tuple[Trial, ...], device: str) -> Verdict:
    environment = {
        "ddpopt": ddpopt.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
    }
    return Verdict(title, size, trials, environment)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _dtype(name: str | None) -> None:
    found = name is None or isinstance(getattr(torch, name, None), torch.dtype)
    if not found or (name is not None and not getattr(torch, name).is_floating_point):
        raise UsageError(
            f"dtype: expected a floating-point dtype of torch's, like float32 or bfloat16, got {name!r}"
        )


def _require(given: str, words: Sequence[str], what: str) -> None:
    if given not in words:
        raise UsageError(f"{what}: expected one of {', '.join(words)}, got {given!r}")


def checked(asked: Sequence[Asked], settings: Settings, nproc: int) -> None:
    """Look up every name before a rank is started.

    Args:
        asked: what to verify.
        settings: for all of it.
        nproc: how many ranks to start.

    Raises:
        UsageError: a mode, an option, a strategy, a backend, a dtype or a number cannot be used.
    """
    _require(settings.strategy or "auto", ("split", "inline", "auto"), "strategy")
    _dtype(settings.dtype)
    find_compiler(settings.backend)
    for name in itertools.chain.from_iterable(one.modes for one in asked):
        mode(name)
    for one in asked:
        option(one.option)
    for what, number in (("nproc", nproc), ("steps", settings.steps)):
        if number < 1:
            raise UsageError(f"{what}: expected a positive number, got {number!r}")
