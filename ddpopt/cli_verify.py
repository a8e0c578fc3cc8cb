"""``ddpopt verify``: read the arguments, run the verification, write the reports.

Invariant: every report that was asked for is written, whatever the verdict; on rank 0 alone under torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer

from ddpopt.errors import UsageError
from ddpopt.report.progress import TrialProgress
from ddpopt.verify.verdict import Status, Verdict

STDOUT = "-"


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
        locate: whether to look where it goes wrong.
        reproduction: file to write the reproducing script to.
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
    locate: bool
    reproduction: str
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
    for name, file in (("--json", files.json), ("--junit", files.junit), ("--html", files.html)):
        _require_writable(name, file)
    verdict = _verify(request)
    if is_first():
        if request.locate and request.target is not None and verdict.exit_code == 1:
            verdict = _located(request, verdict)
        write(verdict, files)
    return verdict


def is_first() -> bool:
    """Whether this process writes the reports: under torchrun, rank 0 alone does."""
    return os.environ.get("RANK", "0") == "0"


def _verify(request: Request) -> Verdict:
    # heavy, and not needed to refuse an argument
    from ddpopt.testing.case import resolve
    from ddpopt.verify.matrix import CASES, matrix, words
    from ddpopt.verify.modes import MODES, mode_of
    from ddpopt.verify.option_cases import differing
    from ddpopt.verify.options import OPTIONS
    from ddpopt.verify.runner import checked, verify_all
    from ddpopt.verify.trials import Asked, Ended, Settings, Started

    modes = words(request.modes, [mode.name for mode in MODES])
    options = words(request.options, [option.name for option in OPTIONS])
    if request.target is None:
        title = f"{len(CASES)} cases"
        asked = matrix(CASES, modes, options)
    else:
        case = resolve(request.target)
        title, chosen = case.name, modes or (mode_of(request.strategy),)
        target = differing(case, request.ddp_kwargs) if request.ddp_kwargs else request.target
        asked = [Asked(target, option, chosen) for option in options or ("default",)]
    strategy = None if modes or request.target is None else request.strategy
    settings = Settings(request.backend, strategy, request.steps, request.dtype)
    checked(asked, settings, request.nproc)
    with TrialProgress(sum(len(one.modes) for one in asked)) as progress:

        def note(event: object) -> None:
            if isinstance(event, Ended):
                progress.ended(f"{event.trial.name}: {event.trial.status}")
            elif isinstance(event, Started):
                progress.began(f"{event.case}: {event.mode} / {event.option}")

        return verify_all(
            title,
            asked,
            settings,
            nproc=request.nproc,
            device=request.device,
            limit_s=request.limit_s,
            on_event=note,
        )


def _located(request: Request, verdict: Verdict) -> Verdict:
    """Look where the first wrong trial goes wrong."""
    from ddpopt.verify.locate import locate

    trial = next(trial for trial in verdict.trials if trial.status is Status.WRONG)
    typer.echo(f"looking where it goes wrong: {trial.name}", err=True)
    location = locate(
        str(request.target),
        trial,
        Path(request.reproduction),
        nproc=verdict.world_size,
        steps=request.steps,
        strategy=None if request.modes else request.strategy,
        dtype=request.dtype,
        device=request.device,
        ddp_kwargs=request.ddp_kwargs,
    )
    return replace(verdict, location=location)


def write(verdict: Verdict, files: Files) -> None:
    """Write every report that was asked for.

    Args:
        verdict: what to report.
        files: which reports, and where to.
    """
    from ddpopt.report.github import write_github
    from ddpopt.report.html import html_page
    from ddpopt.report.junit import junit_xml
    from ddpopt.report.verdict import verdict_text

    texts = ((files.json, verdict.to_json), (files.junit, lambda: junit_xml(verdict)))
    for file, text in (*texts, (files.html, lambda: html_page(verdict))):
        if file is not None and file != STDOUT:
            Path(file).write_text(f"{text()}\n", encoding="utf-8")
    typer.echo(verdict.to_json() if files.json == STDOUT else verdict_text(verdict))
    if files.github:
        write_github(verdict)


def _require_writable(option: str, file: str | None) -> None:
    """Fail before minutes of work, not after."""
    if file is None or file == STDOUT:
        return
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise UsageError(f"{option}: cannot write {file!r}; name a file in a folder that can be written to")


def self_test(nproc: int, files: Files) -> int:
    """Judge the judge, and print how it did.

    Args:
        nproc: how many ranks to start.
        files: which reports to write: of the clean runs, but for JSON, which is of all.

    Returns:
        The exit code: 0 if every fault was found and no clean run was called wrong.

    Raises:
        UsageError: a file cannot be written.
        InfrastructureError: no ranks could be had.
    """
    from ddpopt.report.self_test import self_test_text
    from ddpopt.verify.faults import FAULTS
    from ddpopt.verify.self_test import CLEAN_MODES, CLEAN_RUNS, clean_asked
    from ddpopt.verify.self_test import self_test as judge_the_judge
    from ddpopt.verify.trials import Ended, Started

    _require_writable("--json", files.json)
    total = len(FAULTS) + len(clean_asked(CLEAN_RUNS)) * len(CLEAN_MODES)
    with TrialProgress(total) as progress:

        def note(event: object) -> None:
            if isinstance(event, Ended):
                progress.ended(f"{event.trial.name}: {event.trial.status}")
            elif isinstance(event, Started):
                progress.began(f"{event.case}: {event.mode or 'eager'} / {event.option}")

        result = judge_the_judge(nproc, on_event=note)
    if files.json is not None and files.json != STDOUT:
        Path(files.json).write_text(f"{result.to_json()}\n", encoding="utf-8")
    typer.echo(result.to_json() if files.json == STDOUT else self_test_text(result))
    return 0 if result else 1
