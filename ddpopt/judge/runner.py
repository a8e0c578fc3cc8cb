"""Verification from end to end: which trials, on which ranks, and the verdict.

Trials run in ranks that this process starts, or in torchrun's. Invariant: every trial asked for is in the
verdict.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ddpopt
from ddpopt.cases.case import Case, resolve
from ddpopt.dynamo.backend import find_compiler
from ddpopt.errors import UsageError
from ddpopt.explanation.rehearsal import generators_kept
from ddpopt.judge.attempts import Attempts, Progress, hardware
from ddpopt.judge.modes import mode, mode_of
from ddpopt.judge.options import option
from ddpopt.judge.trials import STEPS, TRIAL_LIMIT_S, Asked, Settings, run_trials
from ddpopt.judge.verdict import Trial, Verdict
from ddpopt.ranks.group import COLLECTIVE_LIMIT_S, joined, under_torchrun

RUN_LIMIT_S = 3600.0
OPTIONS_BY_DEFAULT = ("default",)


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
        waits_s = _waits_s(settings)
        with (
            joined(on_event=on_event, timeout_s=waits_s) as ranks,
            ranks.limited(limit_s, f"verifying {title}"),
        ):
            trials = tuple(run_trials(ranks, asked, settings, ()))
            return _verdict(title, ranks.size, trials, hardware(ranks.device))
    attempts = Attempts(asked, settings, on_event or (lambda _: None))
    trials = attempts.run(nproc, limit_s, device)
    return _verdict(title, nproc, trials, attempts.device)


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
        trials = run_trials(ranks, asked, settings, ())
        return _verdict(case.name, ranks.size, tuple(trials), hardware(ranks.device))


def _waits_s(settings: Settings) -> float:
    """How long ranks that exist wait for each other between trials: a trial's own limit passes before."""
    return max(COLLECTIVE_LIMIT_S, settings.trial_limit_s)


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
    found = torch.float32 if name is None else getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            f"dtype: expected a floating-point dtype of torch's, like float32 or bfloat16, got {name!r}"
        )


def checked(asked: Sequence[Asked], settings: Settings, nproc: int) -> None:
    """Look up every name before a rank is started.

    Args:
        asked: what to verify.
        settings: for all of it.
        nproc: how many ranks to start.

    Raises:
        UsageError: a mode, an option, a backend, a dtype or a number cannot be used.
    """
    _dtype(settings.dtype)
    find_compiler(settings.backend)
    for name in itertools.chain.from_iterable(one.modes for one in asked):
        mode(name)
    for one in asked:
        option(one.option)
    for what, number in (("nproc", nproc), ("steps", settings.steps)):
        if number < 1:
            raise UsageError(f"{what}: expected a positive number, got {number!r}")
    if not settings.trial_limit_s > 0:
        raise UsageError(f"trial_limit_s: expected seconds above 0, got {settings.trial_limit_s!r}")
