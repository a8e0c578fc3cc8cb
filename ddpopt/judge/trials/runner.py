"""Verification from end to end: choose trials and ranks, run them, and form the verdict.

Trials run on ranks that this process starts, or on torchrun's. Invariant: every requested trial is in the
verdict, and every verdict is reported, even if the search for the fault fails.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

import ddpopt
from ddpopt.cases.case import Case
from ddpopt.cases.targets import resolve
from ddpopt.dynamo.backend import find_compiler
from ddpopt.errors import UsageError
from ddpopt.explanation.rehearsal import generators_kept
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.meshes import Sizes, require_parts
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.engines.names import mode_of
from ddpopt.judge.rules.outcome import GIVES
from ddpopt.judge.training.options import option
from ddpopt.judge.trials.attempts import Attempts, Progress
from ddpopt.judge.trials.on_rank import (
    STEPS,
    TRIAL_LIMIT_S,
    Request,
    Settings,
    hardware,
    run_trials,
)
from ddpopt.judge.trials.simulated import Shares
from ddpopt.judge.verdict import Location, Status, Trial, Verdict
from ddpopt.ranks.group import COLLECTIVE_LIMIT_S, joined, one_rank, under_torchrun

RUN_LIMIT_S = 3600.0
NPROC = 2
"""The ranks that are started if no number is given."""
OPTIONS_BY_DEFAULT = ("default",)
Modes = str | Engine | Sequence[str | Engine]
"""One or more modes: names, or engines."""


def verify(  # noqa: PLR0913  # one for each thing that a user may choose
    target: str | Case | Callable[[], object],
    *,
    nproc: int | None = None,
    simulate: int | None = None,
    strategy: str = "auto",
    backend: Any = "inductor",
    mode: Modes | None = None,
    engine: Modes | None = None,
    options: str | Sequence[str] = OPTIONS_BY_DEFAULT,
    steps: int = STEPS,
    dtype: str | None = None,
    device: str | None = None,
    limit_s: float = RUN_LIMIT_S,
    trial_limit_s: float = TRIAL_LIMIT_S,
    on_event: Progress | None = None,
    mesh: tuple[int, int] | None = None,
    trajectory: int | None = None,
) -> Verdict:
    """Verify that a compiled data-parallel step computes what eager DDP computes.

    Under torchrun its ranks are used, and every rank must call this; otherwise ranks are started on this
    machine.

    Args:
        target: a `ddpopt.testing.Case`, a factory of a case, ``"package.module:name"`` of either, or the
            name of a case in the corpus.
        nproc: the number of ranks to start; by default 2, or none if ranks are simulated.
        simulate: also, or instead, judge so many ranks that one process is in turn. They send nothing, so
            what depends on values of other ranks is not judged.
        strategy: ddpopt's strategy, if no mode is given: ``"split"``, ``"inline"`` or ``"auto"``.
        backend: the Dynamo backend: a name, or a callable ``(gm, example_inputs)``.
        mode: the modes to judge, by name (see ``ddpopt.judge.engines.modes``); by default ddpopt's.
        engine: engines to judge: each a `ddpopt.testing.Engine`, or ``package.module:name`` of one, or of a
            function that makes one.
        options: the ways to use DDP, by name (see ``ddpopt.judge.training.options``).
        steps: the number of training steps; DDP rebuilds its buckets before step 2; from step 3 on all is
            settled.
        dtype: the dtype to compute in, ``"float32"``, ``"float64"``, ``"bfloat16"``, …; by default the case's
            own.
        device: ``"cpu"`` or ``"cuda"``; by default a GPU for each rank if there are enough.
        limit_s: limit of the whole run, in seconds.
        trial_limit_s: limit of each trial, and of eager's runs under each option, in seconds. A trial
            compiles, and to judge compiled arithmetic it runs eager several times.
        on_event: called for each trial as it begins and ends.
        mesh: instead of `nproc`, the number of copies of the model, and of the ranks that share each by
            tensor parallelism; the case must say how (``Case.parallelize``).
        trajectory: also train so many steps freely, each from where the last one ended, and judge whether
            the distance from eager DDP is more than rounding explains.

    Returns:
        The verdict, which is true if everything is right. Its findings say what is wrong, with level,
        parameter, bucket, rank and step.

    Raises:
        UsageError: an argument cannot be used.
        InfrastructureError: no ranks could be started.
    """
    modes = (*_names(mode), *_names(engine)) or (mode_of(strategy),)
    for what, given in (("engine", engine), ("mode", mode), ("options", options)):
        if given is not None and not _names(given):
            raise UsageError(f"{what}: expected at least one, got {given!r}")
    settings = Settings(backend, steps, dtype, trial_limit_s, mesh, simulate or 0, trajectory or 0)
    case = resolve(target)
    require_parts(case, mesh)
    nproc = ranks_to_start(nproc, simulate, mesh)
    traveling = target if isinstance(target, str) else case
    requests = [Request(traveling, name, modes) for name in _names(options)]
    for what, count in (("simulate", simulate), ("trajectory", trajectory)):
        if count is not None:
            require_count(what, count)
    checked(requests, settings, nproc)
    return verify_all(
        case.name, requests, settings, nproc=nproc, device=device, limit_s=limit_s, on_event=on_event
    )


def verify_all(
    title: str,
    requests: Sequence[Request],
    settings: Settings,
    *,
    nproc: int | None,
    device: str | None = None,
    limit_s: float = RUN_LIMIT_S,
    on_event: Progress | None = None,
) -> Verdict:
    """Verify several cases, options and modes in one run.

    Args:
        title: the title of the verdict.
        requests: what to verify.
        settings: the settings for all trials.
        nproc: the number of ranks to start; under torchrun, its ranks are used. None for simulated ranks
            only.
        device: as for `verify`.
        limit_s: limit of the whole run, in seconds.
        on_event: as for `verify`.

    Returns:
        The verdict, with every requested trial.

    Raises:
        UsageError: ranks are to be simulated under torchrun.
    """
    if under_torchrun():
        if settings.simulate:
            raise UsageError(
                "simulate: expected one process, which is each rank in turn, got torchrun's; start it "
                "without torchrun"
            )
        with (
            joined(on_event=on_event or (lambda _: None), timeout_s=_waits_s(settings)) as ranks,
            ranks.limited(limit_s, f"verifying {title}"),
        ):
            return _verdict(title, ranks.size, run_trials(ranks, requests, settings), hardware(ranks.device))
    trials: tuple[Trial, ...] = ()
    computed_on = ""
    began_s = time.monotonic()
    if nproc is not None:
        attempts = Attempts(requests, replace(settings, simulate=0), on_event or (lambda _: None))
        trials += attempts.run(nproc, limit_s, device)
        computed_on = attempts.device
    if settings.simulate:
        shares = Shares(requests, replace(settings, trajectory=0), on_event or (lambda _: None))
        left_s = limit_s - (time.monotonic() - began_s)
        trials += shares.run(max(left_s, settings.trial_limit_s), device)  # so that each still gets a result
        computed_on = shares.device
    return _verdict(title, nproc or settings.simulate, trials, computed_on)


def verify_here(
    case: Case,
    *,
    mode: str | Engine | None = None,
    strategy: str = "auto",
    backend: Any = "aot_eager",
    options: Sequence[str] = OPTIONS_BY_DEFAULT,
    steps: int = STEPS,
) -> Verdict:
    """Verify a case on the ranks of the default process group; a collective of all ranks.

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
    requests = [Request(case, name, modes) for name in options]
    settings = Settings(backend, steps)
    with generators_kept(), joined(timeout_s=_waits_s(settings)) as ranks:
        checked(requests, settings, ranks.size)
        return _verdict(case.name, ranks.size, run_trials(ranks, requests, settings), hardware(ranks.device))


def verify_simulated(
    case: Case,
    size: int,
    *,
    mode: str | Engine | None = None,
    strategy: str = "auto",
    backend: Any = "aot_eager",
    options: Sequence[str] = OPTIONS_BY_DEFAULT,
    steps: int = STEPS,
) -> Verdict:
    """Verify a case on ranks that this process is in turn; it must have at most a process group of its own.

    Args:
        case: the case.
        size: the number of simulated ranks.
        mode: as for `verify_here`.
        strategy: as for `verify`.
        backend: as for `verify`.
        options: as for `verify`.
        steps: as for `verify`.

    Returns:
        The verdict. Afterwards this process has no process group.

    Raises:
        UsageError: an argument cannot be used.
    """
    requests = [Request(case, name, (mode or mode_of(strategy),)) for name in options]
    settings = Settings(backend, steps, simulate=size)
    checked(requests, settings, 1)
    require_count("simulate", size)
    with generators_kept(), one_rank(), joined(timeout_s=_waits_s(settings)) as ranks:
        trials = run_trials(ranks, requests, settings)
        return _verdict(case.name, size, trials, hardware(ranks.device))


def verify_and_locate(
    verify: Callable[[], Verdict],
    locate: Callable[[Trial, int], Location] | None,
    report: Callable[[Verdict], None],
) -> Verdict:
    """Verify, locate the fault of the first wrong trial, and report as commands do, only on rank 0.

    Args:
        verify: returns the verdict.
        locate: locates the fault of a trial, given the number of ranks; None to skip that.
        report: writes the verdict.

    Returns:
        The verdict.

    Raises:
        UsageError: an argument cannot be used.
        InfrastructureError: no ranks could be started.
    """
    with joined() if under_torchrun() else nullcontext() as ranks:  # one process group for the whole run
        verdict = verify()
        trial = to_locate(verdict)
        if locate is not None and trial is not None:
            try:
                location = locate(trial, verdict.world_size)
            except Exception as error:  # if the search fails, there is still a verdict
                location = Location((), "none was found: the search failed", note=str(error))
            verdict = replace(verdict, location=location)
        if is_first():
            report(verdict)
        if ranks is not None:
            ranks.gather(None)  # torchrun ends all ranks as soon as one exits with a code other than 0
    return verdict


def to_locate(verdict: Verdict) -> Trial | None:
    """The first trial on real ranks that is wrong, or, if none is, the first that crashed them."""
    candidates = (
        trial
        for status in (Status.WRONG, Status.BROKEN)
        for trial in verdict.trials
        if trial.status is status and not trial.reason.startswith("not tried") and not trial.simulated
    )
    return next(candidates, None)


def is_first() -> bool:
    """Whether this process writes the reports: under torchrun, only rank 0 does.

    Other launchers set ``RANK`` too, but there each process starts its own ranks.
    """
    return not under_torchrun() or os.environ["RANK"] == "0"


def _waits_s(settings: Settings) -> float:
    """How long existing ranks wait for each other between trials: longer than a trial's own limit."""
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


def _names(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, (str, Engine, type)) else tuple(given)


def ranks_to_start(nproc: int | None, simulate: int | None, mesh: Sizes | None) -> int | None:
    """The number of ranks to start: a mesh's, or as given, else 2, but none if ranks are simulated."""
    if mesh is not None:
        return mesh[0] * mesh[1]
    return NPROC if nproc is None and simulate is None else nproc


def checked(requests: Sequence[Request], settings: Settings, nproc: int | None) -> None:
    """Look up every name before a rank is started.

    Args:
        requests: what to verify.
        settings: the settings for all trials.
        nproc: the number of ranks to start; None for none.

    Raises:
        UsageError: a mode, an option, a backend, a dtype or a number cannot be used.
    """
    dtype = torch.float32 if settings.dtype is None else getattr(torch, settings.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            "dtype: expected a floating-point torch dtype, such as float32 or bfloat16, got "
            f"{settings.dtype!r}"
        )
    find_compiler(settings.backend)
    for one in requests:
        option(one.option)
        engines = [mode(each) for each in one.modes]
        for each in engines:
            if each.gives not in GIVES:
                raise UsageError(f"engine {each.name!r}: expected gives of {GIVES}, got {each.gives!r}")
        known = [each.name for each in engines]
        if twice := [name for place, name in enumerate(known) if name in known[:place]]:
            raise UsageError(
                f"engine: expected a name of its own for each, got {twice[0]!r} twice; give one to each, as "
                "in Engine('mine', prepare=prepare)"
            )
    if settings.trajectory and nproc is None:
        raise UsageError(
            "trajectory: expected ranks that send, as a step begins with what they reduced in the last one; "
            "give nproc, too"
        )
    if settings.simulate and settings.mesh is not None:
        raise UsageError("simulate: expected no mesh, whose ranks send what the others compute; omit one")
    require_count("nproc", 1 if nproc is None else nproc)
    require_count("steps", settings.steps)
    if not settings.trial_limit_s > 0:
        raise UsageError(f"trial_limit_s: expected a positive number, got {settings.trial_limit_s!r}")


def require_count(what: str, number: int) -> None:
    """Check that a number of ranks or steps is one.

    Raises:
        UsageError: it is not positive.
    """
    if number < 1:
        raise UsageError(f"{what}: expected a positive number, got {number!r}")
