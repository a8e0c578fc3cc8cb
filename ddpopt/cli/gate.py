"""``ddpopt gate``: read the arguments and the baseline, have everything measured, compare, write the reports.

Invariant: a baseline is only ever written from a run in which every check passed, and only with ``--update``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ddpopt.cli.options import STDOUT
from ddpopt.cli.validation import require_writable
from ddpopt.errors import UsageError
from ddpopt.judge.report.progress import TrialProgress

if TYPE_CHECKING:
    from ddpopt.gate.baseline import Baseline
    from ddpopt.gate.comparison import Comparison
    from ddpopt.gate.figures import Figures
    from ddpopt.gate.measuring import Began, Measured, Settings

TIMED_BY_DEFAULT = 3
"""Up to so many targets are all timed."""
TIMED_OF_CORPUS = "gpt"


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None where it says nothing.

    Attributes:
        baseline: file of the baseline.
        update: whether to write it.
        only: look at these targets alone.
        targets: what to measure.
        modes: names of modes.
        backend: of Dynamo.
        nproc: how many ranks.
        steps: of training.
        device: where.
        timed: targets to time.
        collected: folders whose tests to count.
    """

    baseline: Path
    update: bool = False
    only: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    backend: str | None = None
    nproc: int | None = None
    steps: int | None = None
    device: str | None = None
    timed: tuple[str, ...] | None = None
    collected: tuple[str, ...] | None = None


def words(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between; None for None.

    >>> words("a,b"), words(""), words(None)
    (('a', 'b'), (), None)
    """
    return None if text is None else tuple(word for word in text.split(",") if word)


def run(request: Request, json: str | None, github: bool) -> int:
    """Measure, compare with the baseline, report, and write it if that is asked for.

    Args:
        request: what to compare with what.
        json: file for JSON; ``-`` for stdout, in place of the text.
        github: whether to write annotations and a step summary.

    Returns:
        The exit code.

    Raises:
        UsageError: an argument or the baseline cannot be used.
        InfrastructureError: a rank died, or none could be had.
    """
    # heavy, and not needed to print help
    import torch

    from ddpopt.gate.bands import settled
    from ddpopt.gate.baseline import Baseline, read, release_of
    from ddpopt.gate.changes import changes
    from ddpopt.gate.comparison import Comparison
    from ddpopt.gate.figures import Figures

    require_writable("--json", json)
    require_writable("--baseline", str(request.baseline))
    release = release_of(torch.__version__)
    kept = read(request.baseline)
    settings = settings_of(request, kept)
    baseline = kept or Baseline(settings)
    if request.update:
        before = replace(baseline.measured.get(release, Figures()), tests=baseline.tests)
    else:
        before = baseline.figures(release, request.baseline)
    due, asked, left_out = narrowed(before, settings, request.only)
    measured = _measure(asked, due, baseline)
    moved = changes(due, measured, baseline.bands)
    comparison = Comparison(
        str(request.baseline), release, measured.figures, moved, left_out, updates=request.update
    )
    _report(comparison, json, github)
    if not request.update:
        return comparison.exit_code
    if measured.problems or not measured.figures.cases:
        typer.echo(f"ddpopt: {request.baseline} was not written, for not every check passed", err=True)
        return 1
    new = settled(due, measured.figures, baseline.bands)
    if request.only is not None:
        new = merged(before, new)
    _write(replace(baseline, settings=settings).with_figures(release, new), request.baseline)
    return 0


def settings_of(request: Request, baseline: Baseline | None) -> Settings:
    """What to measure: the baseline's own settings, and with ``--update`` those of the command line.

    Args:
        request: what the command line asks for.
        baseline: None if there is none yet.

    Returns:
        The settings, with every name looked up.

    Raises:
        UsageError: there is no baseline, or a setting is another one than the baseline's, or of no use.
    """
    from ddpopt.gate.measuring import Settings

    given: dict[str, Any] = {
        name: getattr(request, name)
        for name in ("targets", "modes", "backend", "nproc", "steps", "device", "timed", "collected")
        if getattr(request, name) is not None
    }
    if request.update:
        if baseline is None and "timed" not in given:
            given["timed"] = _timed_by_default(given.get("targets", Settings.targets))
        settings = replace(baseline.settings if baseline else Settings(), **given)
    elif baseline is None:
        raise UsageError(
            f"--baseline: there is no file {str(request.baseline)!r} to compare with; write it with --update"
        )
    else:
        _require_same(baseline.settings, given)
        settings = replace(baseline.settings, **given)
    _require_known(settings)
    return settings


def _timed_by_default(targets: Sequence[str]) -> tuple[str, ...]:
    from ddpopt.gate.measuring import CORPUS

    named = tuple(TIMED_OF_CORPUS if target == CORPUS else target for target in targets)
    return named if len(named) <= TIMED_BY_DEFAULT else ()


def _require_same(settings: Settings, given: dict[str, Any]) -> None:
    """Other targets, timings or folders are missing or new ones; anything else compares what differs."""
    for name in ("modes", "backend", "nproc", "steps", "device"):
        if name in given and given[name] != getattr(settings, name):
            raise UsageError(
                f"--{name.rstrip('s') if name == 'modes' else name}: the baseline was measured with "
                f"{getattr(settings, name)!r}, got {given[name]!r}; leave the option out, or write the "
                "baseline anew with --update"
            )


def _require_known(settings: Settings) -> None:
    from ddpopt.cases.case import resolve
    from ddpopt.judge.backends import backend_of
    from ddpopt.judge.modes import mode
    from ddpopt.judge.runner import checked
    from ddpopt.judge.trials import Settings as TrialSettings

    checked([], TrialSettings(backend_of(settings.backend), None, settings.steps), settings.nproc)
    for name in settings.modes:
        if not mode(name, "--mode").observable:
            raise UsageError(f"--mode: expected modes that have DDP's reducer, got {name!r}")
    for name in settings.named:
        resolve(name)
    strangers = [name for name in settings.timed if name not in settings.named]
    if strangers:
        raise UsageError(f"--timed: expected some of the targets, got {', '.join(map(repr, strangers))}")


def narrowed(
    before: Figures, settings: Settings, only: tuple[str, ...] | None
) -> tuple[Figures, Settings, tuple[str, ...]]:
    """Leave out what ``--only`` does not name.

    Args:
        before: the baseline's figures.
        settings: what it measures.
        only: some of its targets; None for all of it.

    Returns:
        The figures that are due, what to measure, and what is left out.

    Raises:
        UsageError: `only` names something else.
    """
    if only is None:
        return before, settings, ()
    strangers = [name for name in only if name not in settings.named]
    if strangers or not only:
        raise UsageError(f"--only: expected some of the baseline's targets, got {','.join(strangers)!r}")
    timed = tuple(name for name in settings.timed if name in only)
    due = replace(
        before,
        cases={name: case for name, case in before.cases.items() if name in only},
        ratios={name: found for name, found in before.ratios.items() if name in only},
        tests={},
    )
    left = [name for name in settings.named if name not in only]
    return due, replace(settings, targets=only, timed=timed, collected=()), (*left, *settings.collected)


def merged(before: Figures, new: Figures) -> Figures:
    """Put new figures in the place of those of the same targets."""
    return replace(before, cases={**before.cases, **new.cases}, ratios={**before.ratios, **new.ratios})


def _measure(settings: Settings, before: Figures, baseline: Baseline) -> Measured:
    from ddpopt.gate.measuring import measure

    with TrialProgress(len(settings.named) + len(settings.timed)) as progress:

        def tell(event: Began) -> None:
            progress.began(event.what)
            progress.ended(event.what)

        return measure(settings, before, baseline.bands, tell)


def _report(comparison: Comparison, json: str | None, github: bool) -> None:
    from ddpopt.gate.github import write_gate_github
    from ddpopt.gate.text import gate_text

    if json is not None and json != STDOUT:
        Path(json).write_text(f"{comparison.to_json()}\n", encoding="utf-8")
    typer.echo(comparison.to_json() if json == STDOUT else gate_text(comparison))
    if github:
        write_gate_github(comparison, sys.stderr if json == STDOUT else sys.stdout)


def _write(baseline: Baseline, file: Path) -> None:
    from ddpopt.gate.baseline import write

    told = "wrote" if write(baseline, file) else "nothing to change in"
    typer.echo(f"ddpopt: {told} {file}", err=True)
