"""Judging one mode against the reference: which levels apply, what each says, and the trial that comes of it.

Invariant: a trial is ok only if at least one numeric level was applied to every gradient that eager
reproduces, or its notes say why not; and all ranks return the same trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddpopt.verify.compare import Difference, arithmetic, bitwise, dense
from ddpopt.verify.modes import Mode
from ddpopt.verify.parallel import Gradients
from ddpopt.verify.reassociation import Reassociated, reassociated, together
from ddpopt.verify.reference import Bench, Failure, Reference, reduced, values
from ddpopt.verify.structure import Evidence, structure
from ddpopt.verify.training import Record, Trainer
from ddpopt.verify.verdict import Finding, Measured, SeenBucket, Status, Trial

EXACT = ("eager", "aot_eager")
"""Backends that run the operations of eager, in its order."""
NEVER = 2**31
CLAIM = {
    "L0": "bit by bit what eager DDP computes",
    "L1": "within the rounding of a sum over ranks",
    "L2": "as right as eager, as far as rounding goes",
}


@dataclass(frozen=True)
class Judged:
    """One comparison of one parameter.

    Attributes:
        measured: its numbers.
        right: whether it passed.
        note: a remark on it.
    """

    measured: Measured
    right: bool
    note: str = ""

    @property
    def weight(self) -> tuple[bool, float]:
        """Larger for what is worse."""
        if self.measured.bound > 0:
            return not self.right, self.measured.error / self.measured.bound
        return not self.right, float("inf") if self.measured.error > 0 else 0.0


@dataclass
class Sheet:
    """What one rank found out of one trial.

    Attributes:
        findings: what is wrong.
        judged: every comparison.
        levels: the levels applied.
        notes: remarks.
    """

    findings: list[Finding]
    judged: list[Judged]
    levels: list[str]
    notes: list[str]


def untampered(trainer: Trainer) -> None:
    """Leave a trainer as it is."""


def judge(
    reference: Reference,
    mode: Mode,
    backend: Any,
    *,
    strategy: str | None = None,
    tamper: Callable[[Trainer], None] = untampered,
    exact: bool | None = None,
) -> Trial:
    """Run a mode and hold it against the reference. A collective of all ranks.

    Args:
        reference: eager DDP's run of the same subject.
        mode: what to judge.
        backend: of Dynamo, for modes that compile.
        strategy: of ddpopt's, in place of the mode's own.
        tamper: for faults that are put in by hand; see `ddpopt.verify.training.Course`.
        exact: whether to compare bit by bit; by default wherever the backend is known to keep eager's order.

    Returns:
        The trial, the same on every rank.
    """
    started = time.monotonic()
    bench = reference.bench
    judgement = _Judgement(reference, mode, backend if mode.compiles else None, exact)
    if mode.fuses and backend != "inductor":
        reason = f"only Inductor fuses all-reduces; without it {mode.name} is python_reducer"
        return judgement.trial(Status.NOT_POSSIBLE, reason=reason)
    needs, gives = bench.subject.option.needs, mode.gives
    if (needs, gives) in {("module", "nothing"), ("module", "arguments"), ("arguments", "nothing")}:
        return judgement.trial(Status.NOT_POSSIBLE, reason=f"{mode.name} has no such option")
    # eager has run twice already; a fault, though, is put into a run of its own
    known = reference.again if mode.name == "eager" and tamper is untampered else None
    record = known or bench.run(
        mode,
        backend if mode.compiles else None,
        follow=reference.eager.starts if judgement.follows else None,
        probe=judgement.probes,
        strategy=strategy,
        tamper=tamper,
    )
    trial = judgement.failed(bench.failures) if record is None else judgement.of(record)
    return replace(trial, seconds=round(time.monotonic() - started, 3))


class _Judgement:
    """One mode, and the reference that it is held against."""

    def __init__(self, reference: Reference, mode: Mode, backend: Any, exact: bool | None = None) -> None:
        self.reference = reference
        self.bench: Bench = reference.bench
        self.option = self.bench.subject.option
        self.mode = mode
        self.backend = backend
        known = backend is None or (backend in EXACT and self.option.computes is None)
        self.exact = known if exact is None else exact
        # the same on every rank, whatever group it is in: what follows has collectives of all ranks
        self.ordered = max(map(len, self.bench.members)) <= 2
        self.probes = self.option.probes and mode.gives == "module"

    @property
    def follows(self) -> bool:
        """Whether each step starts from eager's state: else small differences would add up over steps."""
        steps_apart = self.mode.gives == "nothing" or self.option.forwards > 1
        return steps_apart or not (self.exact and self.ordered)

    def trial(self, status: Status, **more: Any) -> Trial:
        subject = self.bench.subject
        name = "" if self.backend is None else getattr(self.backend, "__name__", str(self.backend))
        return Trial(subject.case.name, self.mode.name, subject.option.name, name, status, **more)

    # ---------------------------------------------------------------------------------- a run that failed

    def failed(self, failures: Sequence[Failure]) -> Trial:
        """Tell what cannot be done here from what the mode gets wrong."""
        own = [failure for failure in failures if not failure.lost] or list(failures)
        text = "; ".join(f"rank {failure.rank}: {failure.text}" for failure in _distinct(own))
        if all(failure.refused for failure in own) and own[0].text.startswith("UsageError"):
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
        return self.bench.run(self.mode, None, follow=self.reference.eager.starts) is None

    # ------------------------------------------------------------------------------------- a run that ended

    def of(self, record: Record) -> Trial:
        """Apply the ladder, and put together what all ranks found."""
        sheet = Sheet([], [], [], [])
        self._structure(record, sheet)
        self._numbers(record, sheet)
        sheets = self.bench.ranks.gather(sheet)
        judged = _worst(judged for sheet in sheets for judged in sheet.judged)
        findings = [finding for sheet in sheets for finding in sheet.findings]
        findings += [_finding(item) for item in judged if not item.right]
        return self.trial(
            Status.WRONG if findings else Status.OK,
            findings=tuple(_once(findings)),
            levels=tuple(sorted({level for sheet in sheets for level in sheet.levels})),
            notes=tuple(
                dict.fromkeys([*(note for sheet in sheets for note in sheet.notes), *_remarks(judged)])
            ),
            measured=tuple(item.measured for item in judged),
            buckets=_buckets(record),
            graphs=len(record.graphs),
        )

    def _structure(self, record: Record, sheet: Sheet) -> None:
        sheet.levels.append("L3")
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
        sheet.findings += structure(evidence, self.bench.ranks.rank)

    def _numbers(self, record: Record, sheet: Sheet) -> None:
        if self.reference.unstable:
            names = ", ".join(sorted(self.reference.unstable))
            culprit = next(iter(self.reference.unstable.values()))
            sheet.notes.append(f"eager itself does not reproduce {names}: {culprit}; not compared bit by bit")
        other_layout = self.option.by_layout and _layout(record) != _layout(self.reference.eager)
        if any(self.bench.ranks.gather(other_layout)):
            sheet.notes.append(
                "numbers were not compared: what is sent depends on the order of parameters in a bucket, and "
                "the reducer's buckets are not those of eager DDP"
            )
            return
        if self.exact and self.ordered:
            self._bitwise(record, sheet)
        elif not self.exact:
            self._arithmetic(record, sheet, None)
        if self.reference.sums is not None and self.exact:
            self._reduction(record, sheet)
        elif not self.ordered and self.exact:
            sheet.notes.append("L1 was not applied: under this option a gradient is no mean over ranks")
            self._arithmetic(record, sheet, None)
        if record.local is not None:
            self._probe(record, record.local, sheet)

    def _bitwise(self, record: Record, sheet: Sheet) -> None:
        sheet.levels.append("L0")
        self._compare(record, sheet, "L0", _equal)
        wrong = [item.measured.step for item in sheet.judged if not item.right]
        # Every rank looks, also one that saw nothing wrong: what follows has collectives.
        first = min(self.bench.ranks.gather(min(wrong, default=NEVER)))
        if first == NEVER:
            return
        # What later steps get wrong follows from it.
        sheet.judged[:] = [item for item in sheet.judged if item.measured.step <= first or item.right]
        moved = reassociated(self.bench, self.mode.name, record.plan)
        moved = together(self.bench.ranks.gather(moved))
        if moved.values:
            self._allow(record, sheet, moved)

    def _allow(self, record: Record, sheet: Sheet, moved: Reassociated) -> None:
        """Judge by arithmetic what may have been summed in another order, and name it."""
        excused = {_plain(item) for item in sheet.judged if not item.right} & moved.reached
        excused = set[str]().union(*self.bench.ranks.gather(excused))
        sheet.judged[:] = [item for item in sheet.judged if _plain(item) not in excused]
        sheet.notes.append(
            f"{moved.why}, hence judged at L2: the gradients of {', '.join(moved.values)}, and of parameters "
            "behind them"
        )
        self._arithmetic(record, sheet, frozenset(excused))

    def _arithmetic(self, record: Record, sheet: Sheet, only: frozenset[str] | None) -> None:
        sheet.levels.append("L2")
        known = self.reference.arithmetic
        unequal = self.mode.gives == "nothing"

        def compare(step: int, name: str, got: Tensor, _: Tensor) -> Difference | None:
            if name not in known[step] or (unequal and name.startswith("buffer ")):
                return None
            return arithmetic(got, known[step][name])

        self._compare(record, sheet, "L2", compare, only)

    def _reduction(self, record: Record, sheet: Sheet) -> None:
        sums, dtype = self.reference.sums or [], self.option.comm_dtype
        excused = {item.measured.parameter for item in sheet.judged if item.measured.level == "L2"}

        def compare(step: int, name: str, got: Tensor, eager: Tensor) -> Difference | None:
            if name not in sums[step] or name in excused:
                return None
            if got.layout is torch.strided and torch.equal(got, eager):
                return self.reference.reduction(step, name)
            return reduced(got, sums[step][name], dtype)

        if self.follows or all(_same_start(record, self.reference.eager, step) for step in range(len(sums))):
            sheet.levels.append("L1")
            self._compare(record, sheet, "L1", compare)
        else:
            sheet.notes.append(
                "L1 was not applied to all steps: they no longer start from eager's parameters"
            )

    def _probe(self, record: Record, own: Gradients, sheet: Sheet) -> None:
        """What the mode computes where nothing is reduced, and its reduction of just that."""
        step, rank = len(record.steps) - 1, self.bench.ranks.rank
        sums = self.bench.sums(own)
        if "L1" not in sheet.levels:
            sheet.levels.append("L1")
        for name, got in record.steps[step].gradients.items():
            if got is None or name not in sums or name in self.reference.unstable:
                continue
            difference = reduced(got, sums[name], self.option.comm_dtype)
            sheet.judged.append(_judged("L1", name, difference, step, rank, _bucket_of(record, name)))
        alone = self.reference.alone
        if alone is None or not self.exact or "L2" in sheet.levels:
            return
        if not self.follows and not _same_start(record, self.reference.eager, step):
            return
        for name, got in own.items():
            expected = alone.steps[step].gradients.get(name)
            if got is None or expected is None:
                if got is not expected:
                    message = f"under no_sync the gradient of {name} is there on one side only"
                    sheet.findings.append(Finding("L3", "no_sync as in eager", message, rank, step, name))
                continue
            if name not in self.reference.unstable and got.shape == expected.shape:
                difference = bitwise(got, expected)
                sheet.judged.append(_judged("L0", name, difference, step, rank, _bucket_of(record, name)))

    def _is_theirs(self, name: str) -> bool:
        """Whether a mode has its own values: only DDP broadcasts buffers; norms over shards are rounded."""
        if self.mode.gives == "nothing" and name.startswith("buffer "):
            return True
        by_norm = name == "norm" or name.startswith("parameter ")
        return self.option.norms and self.mode.is_sharded and by_norm

    def _compare(
        self,
        record: Record,
        sheet: Sheet,
        level: str,
        compare: Callable[[int, str, Tensor, Tensor], Difference | None],
        only: frozenset[str] | None = None,
    ) -> None:
        """Compare all numbers of all steps that both sides have, but for what eager does not reproduce."""
        rank = self.bench.ranks.rank
        for step, name, got, eager in _pairs(record, self.reference.eager, with_state=level == "L0"):
            plain = name.removeprefix("buffer ").removeprefix("parameter ")
            if plain in self.reference.unstable or (only is not None and plain not in only):
                continue
            if self._is_theirs(name):
                continue
            difference = compare(step, name, got, eager)
            if difference is not None:
                bucket = _bucket_of(record, name)
                sheet.judged.append(_judged(level, name, difference, step, rank, bucket))


def _pairs(record: Record, eager: Record, *, with_state: bool) -> Iterator[tuple[int, str, Tensor, Tensor]]:
    for step in range(min(len(record.steps), len(eager.steps))):
        mine, theirs = values(record, step), values(eager, step)
        if with_state:
            for name in theirs.keys() & eager.steps[step].gradients.keys():
                mine[f"parameter {name}"] = record.steps[step].state[name]
                theirs[f"parameter {name}"] = eager.steps[step].state[name]
            for name, extra in eager.steps[step].extras.items():
                if isinstance(extra, Tensor) and isinstance(record.steps[step].extras.get(name), Tensor):
                    mine[name], theirs[name] = record.steps[step].extras[name], extra
        for name, expected in theirs.items():
            got = mine.get(name)
            if got is not None and dense(got).shape == dense(expected).shape and got.dtype == expected.dtype:
                yield step, name, got, expected


def _same_start(record: Record, eager: Record, step: int) -> bool:
    """Whether a step started from the parameters that eager's started from."""
    if step >= len(record.steps):
        return False
    left, right = record.starts[step], eager.starts[step]
    return all(torch.equal(left[name], right[name]) for name in eager.steps[step].gradients)


def _equal(step: int, name: str, got: Tensor, eager: Tensor) -> Difference:
    del step, name
    return bitwise(got, eager)


def _plain(item: Judged) -> str:
    return item.measured.parameter.removeprefix("parameter ")


def _layout(record: Record) -> list[list[tuple[str, ...]]]:
    """The buckets of each synchronised backward."""
    return [[tuple(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]


def _judged(
    level: str, name: str, difference: Difference, step: int, rank: int, bucket: int | None
) -> Judged:
    measured = Measured(name, level, bucket, difference.ulps, difference.error, difference.bound, rank, step)
    return Judged(measured, difference.right, difference.note)


def _worst(items: Iterator[Judged]) -> list[Judged]:
    """For each parameter and level the worst that any rank saw at any step."""
    worst: dict[tuple[str, str], Judged] = {}
    for item in items:
        key = (item.measured.level, item.measured.parameter)
        if key not in worst or item.weight > worst[key].weight:
            worst[key] = item
    return [worst[key] for key in worst]


def _finding(item: Judged) -> Finding:
    seen = item.measured
    bucket = f", bucket {seen.bucket}" if seen.bucket is not None else ""
    remark = f" ({item.note})" if item.note else ""
    what = (
        seen.parameter
        if seen.parameter.startswith(("the loss", "buffer ", "parameter "))
        else (f"the gradient of {seen.parameter}")
    )
    return Finding(
        seen.level,
        CLAIM[seen.level],
        f"{what}{bucket}, step {seen.step}, rank {seen.rank}: off by {seen.error:.3g} where {seen.bound:.3g} "
        f"is allowed, {seen.ulps:.3g} ULP{remark}",
        rank=seen.rank,
        step=seen.step,
        parameter=seen.parameter,
        bucket=seen.bucket,
        ulps=seen.ulps,
        error=seen.error,
        bound=seen.bound,
    )


def _remarks(judged: Sequence[Judged]) -> list[str]:
    """What is to be known of comparisons that passed, with the parameters that it holds for."""
    names: dict[str, list[str]] = {}
    for item in judged:
        if item.note and item.right:
            names.setdefault(item.note, []).append(item.measured.parameter)
    return [f"{note}: {', '.join(of)}" for note, of in names.items()]


def _once(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out what several ranks say in the same words."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        seen.setdefault((finding.level, finding.claim, finding.message), finding)
    return list(seen.values())


def _distinct(failures: Sequence[Failure]) -> list[Failure]:
    return list({failure.text: failure for failure in reversed(failures)}.values())[::-1]


def _bucket_of(record: Record, name: str) -> int | None:
    for bucket in record.iterations[-1].buckets if record.iterations else ():
        if name.removeprefix("parameter ") in bucket.params:
            return bucket.index
    return None


def _buckets(record: Record) -> tuple[SeenBucket, ...]:
    if not record.iterations:
        return ()
    return tuple(
        SeenBucket(bucket.index, tuple(bucket.params), bucket.nbytes, bucket.dtype)
        for bucket in record.iterations[-1].buckets
    )
