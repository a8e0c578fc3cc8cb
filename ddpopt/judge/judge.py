"""Judging one mode against the reference: the run, what it is asked, and the trial that comes of it.

Invariant: a trial is ok only if every number that eager leaves was judged at some level, or a note
names it and says why not; and all ranks return the same trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from ddpopt.judge.compare import dense
from ddpopt.judge.judging.evidence import Evidence
from ddpopt.judge.judging.failing import Failure, told
from ddpopt.judge.judging.ladder import Ladder
from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Bench, Reference
from ddpopt.judge.judging.sheet import findings, remarks, worst
from ddpopt.judge.judging.structure import structure
from ddpopt.judge.modes import Gives, Mode
from ddpopt.judge.trainer import Trainer
from ddpopt.judge.verdict import Finding, SeenBucket, Status, Trial

EXACT = ("eager", "aot_eager")
"""Backends that run the operations of eager, in its order."""

GIVES = get_args(Gives)
"""Each gives more than the one before."""
NO_GRADIENTS = (
    "nothing was judged: in eager DDP no parameter gets a gradient that is a number. Train something, and "
    "look for what makes NaN or infinity"
)


def judge(
    reference: Reference,
    mode: Mode,
    backend: Any,
    *,
    tamper: Callable[[Trainer], None] = lambda _: None,
    exact: bool | None = None,
) -> Trial:
    """Run a mode, each step from eager's state, and hold it against the reference. A collective of all ranks.

    Args:
        reference: eager DDP's run of the same subject.
        mode: what to judge.
        backend: of Dynamo, for modes that compile.
        tamper: for faults that are put in by hand; see `ddpopt.judge.training.Course`.
        exact: whether to compare bit by bit; by default wherever the backend is known to keep eager's order.

    Returns:
        The trial, the same on every rank.
    """
    started = time.monotonic()
    judgement = _Judgement(reference, mode, backend if mode.compiles else None)
    trial = judgement.trial_of(tamper, exact)
    return replace(trial, seconds=round(time.monotonic() - started, 3))


@dataclass
class _Judgement:
    """One mode, and the reference that it is held against."""

    reference: Reference
    mode: Mode
    backend: Any

    def __post_init__(self) -> None:
        self.bench: Bench = self.reference.bench
        self.option = self.bench.subject.option

    def trial_of(self, tamper: Callable[[Trainer], None], exact: bool | None) -> Trial:
        """Run the mode, unless it cannot do what is asked, and judge it."""
        if self.mode.fuses and self.backend != "inductor":
            reason = f"only Inductor fuses all-reduces; without it {self.mode.name} is python_reducer"
            return self.trial(Status.NOT_POSSIBLE, reason=reason)
        if GIVES.index(self.option.needs) > GIVES.index(self.mode.gives):
            return self.trial(Status.NOT_POSSIBLE, reason=f"{self.mode.name} has no such option")
        probes = self.option.probes and self.mode.gives == "module"
        follow = self.reference.eager.starts
        record = self.bench.run(self.mode, self.backend, follow=follow, probe=probes, tamper=tamper)
        if record is None:
            return self.failed(self.bench.failures)
        if exact is None:
            exact = self.backend is None or (self.backend in EXACT and self.option.computes is None)
        return self.of(record, exact)

    def trial(self, status: Status, **more: Any) -> Trial:
        """A trial of this mode."""
        subject = self.bench.subject
        name = "" if self.backend is None else getattr(self.backend, "__name__", str(self.backend))
        return Trial(subject.case.name, self.mode.name, subject.option.name, name, status, **more)

    # ---------------------------------------------------------------------------------- a run that failed

    def failed(self, failures: Sequence[Failure]) -> Trial:
        """Tell what cannot be done here, or did not end in time, from what the mode gets wrong."""
        if self.bench.stalled:
            return self.trial(Status.BROKEN, reason=self.bench.stalled)
        own = [failure for failure in failures if not failure.lost] or list(failures)
        text = told(own)
        if all(failure.refused for failure in own):
            return self.trial(Status.NOT_POSSIBLE, reason=f"refused: {text}")
        if self.backend is not None and self._fails_uncompiled():
            return self.trial(
                Status.NOT_POSSIBLE, reason=f"{self.mode.about} fails without compiling: {text}"
            )
        findings = tuple(Finding("run", "the step runs", failure.text, rank=failure.rank) for failure in own)
        return self.trial(Status.WRONG, findings=findings)

    def _fails_uncompiled(self) -> bool:
        if self.mode.observable:
            return False  # uncompiled it is eager DDP, which is known to run
        record = self.bench.run(self.mode, None, follow=self.reference.eager.starts)
        return record is None and not self.bench.stalled

    # ------------------------------------------------------------------------------------- a run that ended

    def of(self, record: Record, exact: bool) -> Trial:
        """Ask for the structure, climb the ladder, and put together what all ranks found."""
        wrong = self._structure(record)
        # the same on every rank, whatever group it is in: what follows has collectives of all ranks
        ordered = max(map(len, self.bench.members)) <= 2
        sheet = Ladder(self.reference, self.mode, exact=exact, ordered=ordered).climb(record)
        sheet.findings[:0] = wrong
        sheets = self.bench.ranks.gather(sheet.in_short())
        judged = worst(item for one in sheets for item in one.judged)
        found = findings(sheets, judged)
        judged_any = any(self.bench.ranks.gather(_has_gradients(self.reference.eager)))
        return self.trial(
            Status.WRONG if found else Status.OK if judged_any else Status.NOT_POSSIBLE,
            reason="" if judged_any or found else NO_GRADIENTS,
            findings=found,
            levels=tuple(sorted({"L3", *(item.measured.level for item in judged)})),
            notes=remarks(sheets),
            measured=tuple(item.measured for item in judged),
            buckets=_buckets(record),
            graphs=len(record.graphs),
        )

    def _structure(self, record: Record) -> list[Finding]:
        compiled = self.backend is not None
        evidence = Evidence(
            mode=self.mode,
            option=self.option,
            compiled=compiled,
            got=record,
            eager=self.reference.eager,
            peers=self.bench.peers(record),
            eager_peers=self.reference.eager_peers,
            alone=self.reference.graphs if compiled and self.mode.observable else None,
            ranks_differ=self.bench.subject.case.ranks_differ or self.option.more_graphs,
        )
        return structure(evidence, self.bench.ranks.rank)


def _has_gradients(eager: Record) -> bool:
    """Whether there is a gradient with a number in it."""
    gradients = (gradient for step in eager.steps for gradient in step.gradients.values())
    return any(bool(dense(gradient).isfinite().any()) for gradient in gradients if gradient is not None)


def _buckets(record: Record) -> tuple[SeenBucket, ...]:
    last = record.iterations[-1].buckets if record.iterations else ()
    return tuple(SeenBucket(bucket.index, bucket.params, bucket.nbytes, bucket.dtype) for bucket in last)
