"""Run the gate: decide what to measure, measure it on new ranks, and compare or write the baseline.

Invariant: a baseline is only written on request, and from a run in which nothing failed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddpopt.cases.case import Case
from ddpopt.cases.targets import resolve
from ddpopt.doctor.breaks import break_findings
from ddpopt.doctor.dynamo import taking_notes, without_logs_of_torch
from ddpopt.dynamo.backends import backend_of
from ddpopt.errors import UsageError
from ddpopt.gate.baseline import Baseline, Figures, Measuring, named, read, release_of, write
from ddpopt.gate.comparison import Comparison, changes
from ddpopt.gate.figures import case_figures, failures
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.trials.on_rank import Settings, collect_and_freeze, gc_frozen
from ddpopt.judge.trials.runner import checked, is_first, require_count
from ddpopt.ranks.environment import own_size
from ddpopt.ranks.group import Ranks, joined, under_torchrun
from ddpopt.ranks.pool import launch

CASE_LIMIT_S = 900.0
RUN_LIMIT_S = 7200.0


def gate(
    file: Path,
    targets: Sequence[str],
    given: Mapping[str, Any],
    *,
    update: bool,
    begin: Callable[[str, int], None],
) -> tuple[Comparison, Callable[[], str]] | None:
    """Measure, and compare with the baseline.

    Under torchrun its ranks are used: every rank must call this, and the first reads, compares and writes.

    Args:
        file: the baseline.
        targets: the targets to measure; empty for all in the baseline. With `update` new ones are added to
            it.
        given: the requested fields of `Measuring`.
        update: whether to write the baseline.
        begin: called with each case as it begins, and the number of cases.

    Returns:
        The comparison, and a function that writes the baseline if requested; it returns a message about the
        file, empty if no update was requested. None on torchrun's other ranks.

    Raises:
        UsageError: an argument or the baseline cannot be used.
        InfrastructureError: a rank died, or none could be started.
    """
    if not is_first():
        _measure(Measuring(), (), lambda _: None)
        return None
    release = release_of(torch.__version__)
    kept = read(file)
    if under_torchrun():
        if kept is not None and not update and own_size() != kept.settings.nproc:
            raise UsageError(
                f"expected {kept.settings.nproc} ranks, with which the baseline was measured, got torchrun's "
                f"{own_size()}; start as many, or write the baseline with --update"
            )
        given = {**given, "nproc": own_size()}
    settings = settings_of(kept, file, named(targets), given, update=update)
    before = kept.measured.get(release, {}) if kept and update else {}
    if kept and not update:
        before = kept.figures(release, file)
    whole = not targets or (kept is not None and replace(kept.settings, targets=settings.targets) != settings)
    due = settings.targets if whole else named(targets)
    now, causes = _measure(settings, due, lambda name: begin(name, len(due)))
    left_out = tuple(name for name in settings.targets if name not in due)
    old = {name: case for name, case in before.items() if whole or name in due}
    comparison = Comparison(
        str(file),
        release,
        settings.nproc,
        now,
        changes(old, now),
        left_out,
        updates=update,
        is_new=kept is None,
        causes=causes,
    )
    if not update:
        return comparison, lambda: ""
    failed = [f"{name}, {said}" for name, case in now.items() for said in failures(case)]
    if failed or not now:
        said = "\n  ".join(failed) or "nothing was measured"
        return replace(comparison, updates=False), lambda: f"{file} was not written:\n  {said}"
    merged = now if whole else {**before, **now}
    updated = replace(kept or Baseline(), settings=settings).with_figures(release, merged)
    return comparison, lambda: f"{'wrote' if write(updated, file) else 'nothing to change in'} {file}"


def settings_of(
    kept: Baseline | None, file: Path, targets: Sequence[str], given: Mapping[str, Any], *, update: bool
) -> Measuring:
    """Return what to measure: the baseline's own settings, or with `update` the given ones.

    Raises:
        UsageError: there is no baseline, or a setting is invalid or differs from the baseline's.
    """
    if kept is None and not update:
        raise UsageError(
            f"--baseline: there is no file {str(file)!r} to compare with; create it with --update: 'ddpopt "
            f"gate TARGET ... --baseline {file} --update' measures and writes it; then commit it"
        )
    own = kept.settings if kept else Measuring()
    for name, value in given.items():
        if not update and value != getattr(own, name):
            raise UsageError(
                f"--{name.removesuffix('s') if name == 'modes' else name}: the baseline was measured with "
                f"{getattr(own, name)!r}, got {value!r}; leave the option out, or write the baseline with "
                "--update"
            )
    if not (own.targets or targets):
        raise UsageError(f"expected at least one TARGET to measure, got none, and {str(file)!r} has none")
    strangers = [name for name in targets if name not in own.targets]
    if strangers and not update:
        raise UsageError(
            f"expected targets in the baseline, got {', '.join(map(repr, strangers))}; add them with --update"
        )
    settings = replace(own, targets=(*own.targets, *strangers), **given)
    checked([], Settings(backend_of(settings.backend), settings.steps), settings.nproc)
    if settings.trajectory:
        require_count("trajectory", settings.trajectory)
    for name in settings.modes:
        if not mode(name, "--mode").observable:
            raise UsageError(f"--mode: expected modes that use DDP's reducer, got {name!r}")
    for name in settings.targets:
        resolve(name)
    return settings


def _measure(
    settings: Measuring, due: Sequence[str], begin: Callable[[str], None]
) -> tuple[Figures, Mapping[str, Sequence[str]]]:
    """Measure what rank 0 asks for, on torchrun's ranks or new ones.

    Returns:
        Rank 0's figures, and by case where graphs break.
    """

    def hear(event: object) -> None:
        if isinstance(event, str):
            begin(event)

    if under_torchrun():
        with (
            joined(on_event=hear, timeout_s=CASE_LIMIT_S) as ranks,
            ranks.limited(RUN_LIMIT_S, "the gate"),
        ):
            return _on_rank(ranks, *ranks.gather((settings, due))[0])
    if not due:
        return {}, {}
    size = settings.nproc
    device = settings.device
    return launch(_on_rank, settings, due, nproc=size, limit_s=RUN_LIMIT_S, device=device, on_event=hear)[0]


def _on_rank(
    ranks: Ranks, settings: Measuring, due: Sequence[str]
) -> tuple[Figures, Mapping[str, Sequence[str]]]:
    backend = backend_of(settings.backend)
    found = {}
    causes = {}
    with gc_frozen():
        for name in due:
            ranks.emit(name)
            collect_and_freeze()
            with ranks.limited(CASE_LIMIT_S, f"the gate: {name}"):
                case = resolve(name)
                found[name] = case_figures(case, settings, backend, ranks)
                causes[name] = [] if failures(found[name]) else _breaks(case, ranks)
    return found, causes


def _breaks(case: Case, ranks: Ranks) -> list[str]:
    """Where Dynamo breaks the graphs of a case that runs in all modes, with the reasons."""
    args, kwargs = case.inputs(ranks.rank, 0)
    with taking_notes() as notes, without_logs_of_torch():
        torch.compile(case.model(), backend="eager")(*args, **kwargs)
    return [finding.what for finding in break_findings(notes)]
