"""``ddpopt verify``: read the arguments, run the verification, write the reports.

Invariant: every report that was asked for is written, whatever the verdict; on rank 0 alone under torchrun.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ddpopt.cli.options import STDOUT
from ddpopt.cli.validation import require_positive, require_taken, require_writable
from ddpopt.errors import InfrastructureError
from ddpopt.judge.report.progress import TrialProgress
from ddpopt.judge.verdict import Location, Status, Trial, Verdict

if TYPE_CHECKING:
    from ddpopt.judge.trials import Asked, Settings

REPRODUCTION = "ddpopt_reproduction.py"
"""Where the script goes that shows what is wrong, if nobody says where to."""


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        target: what to verify; None for the matrix's own cases.
        nproc: how many ranks.
        strategy: ddpopt's, where no mode is given.
        backend: of Dynamo.
        modes: names with commas between, or ``all``.
        options: names with commas between, or ``all``.
        steps: of training.
        dtype: to compute in.
        device: where.
        limit_s: of the whole run, in seconds.
        trial_limit_s: of one trial, in seconds.
        locate: whether to look where it goes wrong.
        locate_limit_s: of looking there, in seconds.
        reproduction: file to write the reproducing script to; None for `REPRODUCTION`.
        ddp_kwargs: DDP's arguments, in place of the target's own.
    """

    target: str | None
    nproc: int
    strategy: str
    backend: str
    modes: str | None
    options: str | None
    steps: int
    dtype: str | None
    device: str | None
    limit_s: float
    trial_limit_s: float
    locate: bool
    locate_limit_s: float
    reproduction: str | None
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Files:
    """Which reports to write, and where to.

    Attributes:
        json: file for JSON; ``-`` for stdout, in place of the text.
        junit: file for JUnit XML.
        html: file for a page.
        github: whether to write annotations and a step summary.
    """

    json: str | None
    junit: str | None
    html: str | None
    github: bool


def run(request: Request, files: Files) -> Verdict:
    """Verify, and write the reports.

    Args:
        request: what to verify.
        files: which reports to write.

    Returns:
        The verdict.

    Raises:
        UsageError: an argument cannot be used.
        InfrastructureError: no ranks could be had.
    """
    _require_all_writable(files)
    if request.locate:
        require_writable("--reproduction", request.reproduction)
    require_positive("--timeout", request.limit_s)
    require_positive("--trial-timeout", request.trial_limit_s)
    require_positive("--locate-timeout", request.locate_limit_s)
    work = _checked(request)
    with _on_ranks() as meet:
        verdict = _verify(request, *work)
        trial = _to_locate(verdict) if request.locate and request.target is not None else None
        if trial is not None:
            verdict = _located(request, files, verdict, trial)
        if is_first():
            write(verdict, files)
        meet()
    return verdict


@contextlib.contextmanager
def _on_ranks() -> Iterator[Callable[[], object]]:
    """Under torchrun, one process group for all that follows; yields what has its ranks wait for each other.

    Torchrun ends all ranks when one ends with another exit code than 0, so none may leave early.
    """
    from ddpopt.ranks.group import joined, under_torchrun

    if not under_torchrun():
        yield lambda: None
        return
    with joined() as ranks:
        yield lambda: ranks.gather(None)


def _to_locate(verdict: Verdict) -> Trial | None:
    """The first trial that is wrong, or, if none is, the first that took its ranks down."""
    wrong = [trial for trial in verdict.trials if trial.status is Status.WRONG]
    broken = [trial for trial in verdict.trials if trial.status is Status.BROKEN]
    tried = [trial for trial in broken if not trial.reason.startswith("not tried")]
    return next(iter([*wrong, *tried]), None)


def is_first() -> bool:
    """Whether this process writes the reports: under torchrun, rank 0 alone does.

    Other launchers set ``RANK`` too, for processes that each start ranks of their own here.
    """
    from ddpopt.ranks.group import under_torchrun  # heavy, and loaded by now

    return not under_torchrun() or os.environ["RANK"] == "0"


def _checked(request: Request) -> tuple[str, list[Asked], Settings]:
    """Everything looked up by its name, before ranks are started or joined."""
    # heavy, and not needed to refuse an argument
    from ddpopt.judge.backends import backend_of
    from ddpopt.judge.runner import checked
    from ddpopt.judge.trials import Settings

    title, asked = _asked(request)
    strategy = None if request.modes or request.target is None else request.strategy
    settings = Settings(
        backend_of(request.backend), strategy, request.steps, request.dtype, request.trial_limit_s
    )
    checked(asked, settings, request.nproc)
    return title, asked, settings


def _verify(request: Request, title: str, asked: list[Asked], settings: Settings) -> Verdict:
    from ddpopt.judge.runner import verify_all

    with TrialProgress(sum(len(one.modes) for one in asked)) as progress:
        return verify_all(
            title,
            asked,
            settings,
            nproc=request.nproc,
            device=request.device,
            limit_s=request.limit_s,
            on_event=_telling(progress),
        )


def _asked(request: Request) -> tuple[str, list[Asked]]:
    """What to judge, and a name for all of it."""
    from ddpopt.cases.case import resolve
    from ddpopt.judge.matrix import CASES, matrix, words
    from ddpopt.judge.modes import MODES, mode, mode_of
    from ddpopt.judge.option_cases import differing
    from ddpopt.judge.options import OPTIONS, option
    from ddpopt.judge.trials import Asked

    modes = words(request.modes, [known.name for known in MODES], "--mode")
    options = words(request.options, [known.name for known in OPTIONS], "--options")
    for name in modes:
        mode(name, "--mode")
    for name in options:
        option(name, "--options")
    if request.target is None:
        return f"{len(CASES)} cases", matrix(CASES, modes, options)
    case = resolve(request.target)
    chosen = modes or (mode_of(request.strategy),)
    target = differing(case, request.ddp_kwargs) if request.ddp_kwargs else request.target
    return case.name, [Asked(target, name, chosen) for name in options or ("default",)]


def _telling(progress: TrialProgress) -> Callable[[object], None]:
    """Return what shows each trial's beginning and end."""
    from ddpopt.judge.trials import Ended, Started

    def note(event: object) -> None:
        if isinstance(event, Ended):
            progress.ended(f"{event.trial.name}: {event.trial.status}")
        elif isinstance(event, Started):
            progress.began(f"{event.case}: {event.mode or 'eager'} / {event.option}")

    return note


def _located(request: Request, files: Files, verdict: Verdict, trial: Trial) -> Verdict:
    """Look where a trial goes wrong; whatever becomes of that, there is a verdict to report."""
    from ddpopt.judge.locate import locate

    def finish(location: Location) -> None:
        """Torchrun's ranks are about to be ended: report, and leave with the verdict's exit code."""
        write(replace(verdict, location=location), files)
        sys.stdout.flush()
        os._exit(verdict.exit_code)

    if is_first():
        typer.echo(f"looking where it goes wrong: {trial.name}", err=True)
    try:
        location = locate(
            str(request.target),
            trial,
            Path(request.reproduction or REPRODUCTION),
            nproc=verdict.world_size,
            steps=request.steps,
            strategy=None if request.modes else request.strategy,
            dtype=request.dtype,
            device=request.device,
            backend=request.backend,
            ddp_kwargs=request.ddp_kwargs,
            limit_s=request.locate_limit_s,
            on_late=finish,
        )
    except (OSError, InfrastructureError) as error:
        location = Location((), "none was found: the search failed", note=str(error))
    return replace(verdict, location=location)


def write(verdict: Verdict, files: Files) -> None:
    """Write every report that was asked for.

    Args:
        verdict: what to report.
        files: which reports, and where to.
    """
    from ddpopt.judge.report.verdict import verdict_text

    _write(verdict, files, verdict.to_json, lambda: verdict_text(verdict))


def _write(verdict: Verdict, files: Files, to_json: Callable[[], str], to_text: Callable[[], str]) -> None:
    from ddpopt.judge.report.github import write_github
    from ddpopt.judge.report.html import html_page
    from ddpopt.judge.report.junit import junit_xml

    texts = ((files.json, to_json), (files.junit, lambda: junit_xml(verdict)))
    for file, text in (*texts, (files.html, lambda: html_page(verdict))):
        if file is not None and file != STDOUT:
            Path(file).write_text(f"{text()}\n", encoding="utf-8")
    typer.echo(to_json() if files.json == STDOUT else to_text())
    if files.github:
        write_github(verdict, sys.stderr if files.json == STDOUT else sys.stdout)


def _require_all_writable(files: Files) -> None:
    for name, file in (("--json", files.json), ("--junit", files.junit), ("--html", files.html)):
        require_writable(name, file)


def self_test(nproc: int, files: Files, given: Sequence[str] = ()) -> int:
    """Judge the judge, and print how it did.

    Args:
        nproc: how many ranks to start.
        files: which reports to write: a trial for each fault, and the clean runs.
        given: names of the parameters that stand on the command line.

    Returns:
        The exit code: 0 if every fault was put in and found, and every clean run raised nothing.

    Raises:
        UsageError: a file cannot be written, or a parameter has no meaning here.
        InfrastructureError: no ranks could be had.
    """
    from ddpopt.judge.faults import FAULTS
    from ddpopt.judge.injected.clean_runs import MODES, clean_runs
    from ddpopt.judge.report.self_test import self_test_text
    from ddpopt.judge.self_test import self_test as judge_the_judge

    require_taken(given)
    _require_all_writable(files)
    faults = sum(fault.shows_on(nproc) for fault in FAULTS)
    with TrialProgress(faults + len(clean_runs()) * len(MODES)) as progress:
        result = judge_the_judge(nproc, on_event=_telling(progress))
    verdict = result.as_verdict()
    _write(verdict, files, result.to_json, lambda: self_test_text(result))
    return verdict.exit_code
