"""Judge one mode against the reference: run it, compare it, and report a trial.

Invariant: a trial is ok only if every number that eager leaves was judged at some level, or a note names it
and says why it was not; all ranks return the same trial.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.rules.evidence import RunEvidence
from ddpopt.judge.rules.failing import own_of, told
from ddpopt.judge.rules.ladder import Ladder, findings, remarks, worst
from ddpopt.judge.rules.outcome import ended, failed, has_gradients, has_option, is_exact
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.rules.structure import structure
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.trainer import Trainer
from ddpopt.judge.verdict import SeenBucket, Status, Trial


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
    if not has_option(mode, bench.subject.option):
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

    def uncompiled() -> str:
        if backend is None or mode.observable:  # uncompiled, that is eager DDP, which is known to run
            return ""
        record = bench.run(mode, None, follow=reference.eager.starts)
        if record is not None or bench.stalled:
            return ""
        return f"; without compiling {mode.name} fails, too: {told(own_of(bench.failures))}"

    differ = bench.subject.adapted.ranks_differ
    return failed(bench.failures, bench.stalled, ranks_differ=differ, remark=uncompiled)


def _judged(
    reference: Reference, mode: Engine, backend: Any, record: Record, exact: bool | None
) -> dict[str, Any]:
    """Check the structure, climb the ladder, and merge what all ranks found."""
    bench = reference.bench
    if exact is None:
        exact = is_exact(mode, bench.subject.option, backend)
    wrong = structure(_evidence(reference, mode, backend, record), bench.ranks.rank)
    sheet = Ladder(reference, mode, exact=exact, ordered=bench.grid.size <= 2).climb(record)
    sheet.findings[:0] = wrong
    sheets = bench.ranks.gather(sheet.in_short())
    judged = worst(item for one in sheets for item in one.judged)
    found = findings(sheets, judged, bench.ranks.gather(reference.ready)[0])
    judged_any = any(bench.ranks.gather(has_gradients(reference.eager)))
    last = record.iterations[-1].buckets if record.iterations else ()
    missed = (*record.unjudged, *reference.unjudged)
    unjudged = tuple(dict.fromkeys(what for of_rank in bench.ranks.gather(missed) for what in of_rank))
    return {
        **ended(found, judged_any, unjudged),
        "findings": found,
        "unjudged": unjudged,
        "levels": tuple(sorted({"L3", *(item.measured.level for item in judged)})),
        "notes": remarks(sheets),
        "measured": tuple(item.measured for item in judged),
        "buckets": tuple(SeenBucket(one.index, one.params, one.nbytes, one.dtype) for one in last),
        "graphs": len(record.graphs),
    }


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
