"""Judging one mode against the reference: the run, what it is asked, and the trial that comes of it.

Invariant: a trial is ok only if every number that eager leaves was judged at some level, or a note
names it and says why not; and all ranks return the same trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpopt.judge.compare import dense
from ddpopt.judge.judging.failing import Failure, told
from ddpopt.judge.judging.ladder import Ladder
from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Bench, Reference
from ddpopt.judge.judging.sheet import findings, remarks, worst
from ddpopt.judge.judging.structure import Evidence, structure
from ddpopt.judge.modes import Mode
from ddpopt.judge.trainer import Trainer
from ddpopt.judge.verdict import Finding, SeenBucket, Status, Trial

EXACT = ("eager", "aot_eager")
"""Backends that run the operations of eager, in its order."""

NOTHING = Status.NOT_POSSIBLE
NO_GRADIENTS = (
    "nothing was judged: in eager DDP no parameter gets a gradient that is a number. Train something, and "
    "look for what makes NaN or infinity"
)


def untampered(trainer: Trainer) -> None:
    """Leave a trainer as it is."""


def judge(
    reference: Reference,
    mode: Mode,
    backend: Any,
    *,
    tamper: Callable[[Trainer], None] = untampered,
    exact: bool | None = None,
) -> Trial:
    """Run a mode and hold it against the reference. A collective of all ranks.

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
    trial = _Judgement(reference, mode, backend, tamper, exact).trial_of()
    return replace(trial, seconds=round(time.monotonic() - started, 3))


@dataclass
class _Judgement:
    """One mode, and the reference that it is held against."""

    reference: Reference
    mode: Mode
    asked_backend: Any
    tamper: Callable[[Trainer], None]
    asked_exact: bool | None

    def __post_init__(self) -> None:
        self.bench: Bench = self.reference.bench
        self.option = self.bench.subject.option
        self.backend = self.asked_backend if self.mode.compiles else None
        known = self.backend is None or (self.backend in EXACT and self.option.computes is None)
        self.exact = known if self.asked_exact is None else self.asked_exact
        # the same on every rank, whatever group it is in: what follows has collectives of all ranks
        self.ordered = max(map(len, self.bench.members)) <= 2

    @property
    def follows(self) -> bool:
        """Whether each step starts from eager's state.

        Else small differences would add up over steps, and so would what is not the same twice.
        """
        steps_apart = self.mode.gives == "nothing" or self.option.forwards > 1 or self.option.by_layout
        return steps_apart or bool(self.reference.unstable) or not (self.exact and self.ordered)

    def trial_of(self) -> Trial:
        """Run the mode, unless it cannot do what is asked, and judge it."""
        if self.mode.fuses and self.backend != "inductor":
            reason = f"only Inductor fuses all-reduces; without it {self.mode.name} is python_reducer"
            return self.trial(Status.NOT_POSSIBLE, reason=reason)
        needs, gives = self.option.needs, self.mode.gives
        if (needs, gives) in {("module", "nothing"), ("module", "arguments"), ("arguments", "nothing")}:
            return self.trial(Status.NOT_POSSIBLE, reason=f"{self.mode.name} has no such option")
        # eager has run twice already; a fault, though, is put into a run of its own
        known = self.reference.again if self.mode.name == "eager" and self.tamper is untampered else None
        record = known or self.run(self.follows)
        return self.failed(self.bench.failures) if record is None else self.of(record)

    def run(self, follows: bool) -> Record | None:
        """Train in the mode, each step from eager's state or on from the one before."""
        return self.bench.run(
            self.mode,
            self.backend,
            follow=self.reference.eager.starts if follows else None,
            probe=self.option.probes and self.mode.gives == "module",
            tamper=self.tamper,
        )

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

    def of(self, record: Record) -> Trial:
        """Ask for the structure, climb the ladder, and put together what all ranks found."""
        wrong = self._structure(record)
        ladder = Ladder(
            self.reference,
            self.mode,
            exact=self.exact,
            ordered=self.ordered,
            run_again=lambda: self.run(follows=True),
        )
        sheet = ladder.climb(record)
        sheet.findings[:0] = wrong
        sheet.apply("L3")
        sheets = self.bench.ranks.gather(sheet.in_short())
        judged = worst(item for one in sheets for item in one.judged)
        found = findings(sheets, judged)
        stalled = "" if found else ladder.stalled
        judged_any = any(self.bench.ranks.gather(_has_gradients(self.reference.eager)))
        return self.trial(
            Status.WRONG if found else Status.BROKEN if stalled else Status.OK if judged_any else NOTHING,
            reason=stalled or ("" if judged_any or found else NO_GRADIENTS),
            findings=found,
            levels=tuple(sorted({level for one in sheets for level in one.levels})),
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
    if not record.iterations:
        return ()
    return tuple(
        SeenBucket(bucket.index, tuple(bucket.params), bucket.nbytes, bucket.dtype)
        for bucket in record.iterations[-1].buckets
    )
