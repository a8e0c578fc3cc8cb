"""Judge one mode against the reference: run it, compare it, and report a trial.

Invariant: a trial is ok only if every number that eager leaves was judged at some level, or a note names it
and says why it was not; all ranks return the same trial.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from ddpopt.judge.compare import dense
from ddpopt.judge.engines.engine import Engine, Gives
from ddpopt.judge.rules.evidence import RunEvidence
from ddpopt.judge.rules.failing import Failure, own_of, told
from ddpopt.judge.rules.ladder import Ladder, findings, remarks, worst
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.rules.structure import structure
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.trainer import Trainer
from ddpopt.judge.verdict import Finding, SeenBucket, Status, Trial

EXACT = ("eager", "aot_eager")
"""Backends that run the operations of eager, in its order."""

GIVES = get_args(Gives)
"""In ascending order: each offers more than the one before."""
JUDGE_FAILED = "the judge itself failed, so nothing was learned; please report this"
NO_GRADIENTS = (
    "nothing was judged: in eager DDP, no parameter gets a finite gradient. Make sure that a parameter is "
    "trained, and look for the source of NaN or infinity"
)


def judge(
    reference: Reference,
    mode: Engine,
    backend: Any,
    *,
    tamper: Callable[[Trainer], None] = lambda _: None,
    exact: bool | None = None,
) -> Trial:
    """Run a mode, each step from eager's state, and compare it with the reference. A collective of all ranks.

    Args:
        reference: eager DDP's run of the same subject.
        mode: the mode to judge.
        backend: the Dynamo backend, for modes that compile.
        tamper: hook for injected faults; see `ddpopt.judge.training.trainer.Course`.
        exact: whether to compare bit for bit; by default if the backend is known to keep eager's order.

    Returns:
        The trial, the same on every rank.
    """
    started = time.monotonic()
    bench = reference.bench
    backend = backend if mode.compiles else None
    name = "" if backend is None else getattr(backend, "__name__", str(backend))
    trial = Trial(bench.subject.case.name, mode.name, bench.subject.option.name, name, Status.REFUSED)
    if GIVES.index(bench.subject.option.needs) > GIVES.index(mode.gives):
        return replace(trial, reason=f"{mode.name} has no such option")
    record = bench.run(mode, backend, follow=reference.eager.starts, tamper=tamper)
    if record is None:
        fields = _failed(reference, mode, backend)
    else:
        fields = _judged(reference, mode, backend, record, exact)
    return replace(trial, seconds=round(time.monotonic() - started, 3), **fields)


def _failed(reference: Reference, mode: Engine, backend: Any) -> dict[str, Any]:
    """Distinguish a mode that fails from one that ddpopt refuses, and from a run that was not judged."""
    bench = reference.bench
    if bench.stalled:
        return {"status": Status.BROKEN, "reason": bench.stalled}
    own = own_of(bench.failures)
    if any(failure.of_judge for failure in own):
        return {"status": Status.BROKEN, "reason": f"{JUDGE_FAILED}: {told(own)}"}
    is_refused = all(failure.refused for failure in own)
    if any(failure.if_ranks_differ for failure in own):
        is_refused = is_refused and bench.subject.adapted.ranks_differ
    if is_refused:
        return {"status": Status.REFUSED, "reason": told(own)}
    remark = ""
    if backend is not None and not mode.observable:  # uncompiled, that is eager DDP, which is known to run
        record = bench.run(mode, None, follow=reference.eager.starts)
        if record is None and not bench.stalled:
            remark = f"; without compiling {mode.name} fails, too: {told(own_of(bench.failures))}"
    findings = (Finding("run", "the step runs", f"{_where(each)}{remark}", rank=each.rank) for each in own)
    return {"status": Status.WRONG, "findings": tuple(findings)}


def _where(failure: Failure) -> str:
    return f"extra step: {failure.extra}: {failure.text}" if failure.extra else failure.text


def _judged(
    reference: Reference, mode: Engine, backend: Any, record: Record, exact: bool | None
) -> dict[str, Any]:
    """Check the structure, climb the ladder, and merge what all ranks found."""
    bench = reference.bench
    if exact is None:
        runs_as_eager = backend is None or (backend in EXACT and bench.subject.option.computes is None)
        exact = mode.exact and runs_as_eager
    wrong = structure(_evidence(reference, mode, backend, record), bench.ranks.rank)
    sheet = Ladder(reference, mode, exact=exact, ordered=bench.grid.size <= 2).climb(record)
    sheet.findings[:0] = wrong
    sheets = bench.ranks.gather(sheet.in_short())
    judged = worst(item for one in sheets for item in one.judged)
    found = findings(sheets, judged, bench.ranks.gather(reference.ready)[0])
    judged_any = any(bench.ranks.gather(_has_gradients(reference.eager)))
    last = record.iterations[-1].buckets if record.iterations else ()
    missed = (*record.unjudged, *reference.unjudged)
    unjudged = tuple(dict.fromkeys(what for of_rank in bench.ranks.gather(missed) for what in of_rank))
    return {
        **_ended(found, judged_any, unjudged),
        "findings": found,
        "unjudged": unjudged,
        "levels": tuple(sorted({"L3", *(item.measured.level for item in judged)})),
        "notes": remarks(sheets),
        "measured": tuple(item.measured for item in judged),
        "buckets": tuple(SeenBucket(one.index, one.params, one.nbytes, one.dtype) for one in last),
        "graphs": len(record.graphs),
    }


def _ended(found: Sequence[Finding], judged_any: bool, unjudged: Sequence[str]) -> dict[str, Any]:
    """The status of a trial whose run was compared, and the reason."""
    if found:
        return {"status": Status.WRONG}
    if not judged_any:
        return {"status": Status.NOT_POSSIBLE, "reason": NO_GRADIENTS}
    if unjudged:
        return {"status": Status.BROKEN, "reason": f"not judged in full: {'; '.join(unjudged)}"}
    return {"status": Status.OK}


def _evidence(reference: Reference, mode: Engine, backend: Any, record: Record) -> RunEvidence:
    bench = reference.bench
    subject = reference.bench.subject
    alike = bench.grid.columns is None  # split models without ddpopt are compiled once more after a forward
    return RunEvidence(
        mode=mode,
        option=subject.option,
        compiled=backend is not None,
        got=record,
        eager=reference.eager,
        peers=bench.peers(record),
        eager_peers=reference.eager_peers,
        alone=reference.graphs if backend is not None and mode.observable and alike else None,
        uncompiled=_sent_uncompiled(reference, mode, backend),
        ranks_differ=subject.case.ranks_differ or subject.option.more_graphs,
        rank=bench.grid.rank,
    )


def _sent_uncompiled(reference: Reference, mode: Engine, backend: Any) -> list[tuple[str, ...]] | None:
    """The collectives of each step without a backend; None if they may be others."""
    if backend is None or not mode.sends_as_uncompiled:
        return None
    record = reference.bench.run(mode, None, follow=reference.eager.starts)
    return [] if record is None else record.sent


def _has_gradients(eager: Record) -> bool:
    """Whether there is a gradient with a number in it."""
    gradients = (gradient for step in eager.steps for gradient in step.gradients.values())
    return any(bool(dense(gradient).isfinite().any()) for gradient in gradients if gradient is not None)
