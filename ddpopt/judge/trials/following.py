"""Judge one mode along a trajectory: many steps, each from where the last one ended.

Invariant: all ranks return the same trial.
"""

import time
from contextlib import closing
from dataclasses import replace
from typing import Any

from ddpopt.cases.case import Call
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.rules.bench import Bench
from ddpopt.judge.rules.outcome import ended, failed, has_gradients, has_option, is_exact
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.trajectory.comparison import first_wrong, measured, remarks, sheet, silence
from ddpopt.judge.trajectory.free import FreeRun, FreeRuns, Tamper
from ddpopt.judge.trajectory.track import ComparedRun
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.verdict import Finding, Status, Trial

CLAIM = {
    "L0": "step after step, bit for bit what eager DDP computes",
    "L2": "step after step, as near to eager DDP as runs of it that rounding cannot tell apart",
}
NOT_FREE = "goes on from a checkpoint in new processes, so it is judged by single steps alone"


def follow(
    runs: FreeRuns, engine: Engine, backend: Any, single: Trial, *, tamper: Tamper = lambda _: None
) -> Trial:
    """Train freely in a mode, and compare it with eager step by step. A collective of all ranks.

    Args:
        runs: eager's free runs.
        engine: the mode.
        backend: the Dynamo backend, for modes that compile.
        single: the trial of the same mode by single steps.
        tamper: hook for injected faults; see `ddpopt.judge.training.trainer.Course`.

    Returns:
        The trial, the same on every rank.
    """
    started = time.monotonic()
    backend = backend if engine.compiles else None
    bench = runs.reference.bench
    option = bench.subject.option
    trial = replace(_blank(single), trajectory=runs.steps)
    if not has_option(engine, option):
        return replace(trial, reason=f"{engine.name} has no such option")
    if option.resumes:
        return replace(trial, reason=f"the option {option.name} {NOT_FREE}")
    free = runs.of(engine)
    if free is None:
        return replace(trial, **runs.failed)
    got = free.next_to(engine, backend, tamper)
    if got is None:
        ranks_differ = bench.subject.adapted.ranks_differ
        fields = failed(free.bench.failures, free.bench.stalled, ranks_differ=ranks_differ)
    else:
        exact = is_exact(engine, option, backend) and _has_one_order(runs.reference, single)
        fields = _compared(free, got, is_exact=exact)
        if fields["findings"]:
            one_step = _one_step(free, fields["findings"][0], engine, backend, tamper)
            fields["findings"] = (one_step, *fields["findings"][1:])
    return replace(trial, seconds=round(time.monotonic() - started, 3), **fields)


def _blank(single: Trial) -> Trial:
    return Trial(single.case, single.mode, single.option, single.backend, Status.REFUSED)


def _has_one_order(reference: Reference, single: Trial) -> bool:
    """Whether each number is computed in one order only, so that right runs are equal."""
    by_rounding = any(seen.level == "L2" and seen.moment.startswith("step ") for seen in single.measured)
    return reference.bench.grid.size <= 2 and not reference.unstable and not by_rounding


def _compared(free: FreeRun, got: ComparedRun, *, is_exact: bool) -> dict[str, Any]:
    """The fields of a trial whose run ended."""
    ranks = free.bench.ranks
    steps = len(free.track.steps)
    differs = any(ranks.gather(any(not each.is_equal for step in got.steps for each in step.values())))
    bands = free.bands() if differs else None
    sheets = ranks.gather(sheet(ranks.rank, free.track.steps, got.steps, bands, is_exact=is_exact))
    level = "L0" if is_exact else "L2"
    wrong = first_wrong(sheets)
    findings: tuple[Finding, ...] = ()
    if wrong:
        first = wrong[0]
        more = f", and {len(wrong) - 1} more numbers in that step" if len(wrong) > 1 else ""
        message = f"from step {first.step} on: {first.message}{more}"
        findings = (Finding(level, CLAIM[level], message, first.rank, first.step, first.name),)
    missed = dict.fromkeys(what for of_rank in ranks.gather(free.unjudged) for what in of_rank)
    if silent := silence(sheets, steps):
        missed[silent] = None
    judged_any = any(ranks.gather(has_gradients(free.reference.eager)))
    shown = wrong[0].rank if wrong else 0
    return {
        **ended(findings, judged_any, tuple(missed)),
        "findings": findings,
        "unjudged": tuple(missed),
        "levels": (level,),
        "notes": tuple(remarks(sheets, steps)),
        "measured": tuple(measured(sheets)),
        "drifts": sheets[shown].drifts,
        "graphs": max(ranks.gather(got.graphs)),
    }


def _one_step(free: FreeRun, found: Finding, engine: Engine, backend: Any, tamper: Tamper) -> Finding:
    """The finding with whether one step from eager's state before it is wrong, too."""
    step = found.step or 0
    subject = free.bench.subject
    case = subject.adapted

    def model() -> Any:
        made = case.model()
        if step:
            free.track.restore(made, step - 1)
        return made

    def inputs(rank: int, later: int) -> Call:
        return case.inputs(rank, step + later)

    option = replace(subject.option, adapt=lambda case: case)
    there = replace(subject, case=replace(case, model=model, inputs=inputs), option=option, steps=1)
    with closing(Bench(there, free.bench.ranks, free.bench.collective_limit_s)) as bench:
        reference = Reference.make(bench)
        trial = None if reference is None else judge(reference, engine, backend, tamper=tamper)
    if trial is None or trial.status is Status.BROKEN:
        told = "one step from eager's state before it could not be judged"
    elif trial.findings:
        told = f"one step from eager's state before it is wrong, too: {trial.findings[0].message}"
    else:
        told = "one step from eager's state before it is right, so the error is in what earlier steps left"
    return replace(found, message=f"{found.message}; {told}")
