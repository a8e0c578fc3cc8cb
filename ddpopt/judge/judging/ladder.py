"""The numeric ladder: every number of a run held against eager DDP's, at the level that its rules name.

Invariant: every number that eager leaves is judged at one level at least, or a remark names it with
the reason; and all ranks enter the same collectives.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ddpopt.judge.compare import Difference, bitwise, communication, dense
from ddpopt.judge.judging.arithmetic import arithmetic
from ddpopt.judge.judging.record import (
    LOSS,
    Number,
    NumberKind,
    Record,
    RecordedStep,
    Rules,
    buckets_of,
    pairs,
    unreduced,
)
from ddpopt.judge.judging.reference import Reference
from ddpopt.judge.judging.sheet import Sheet
from ddpopt.judge.modes import Mode
from ddpopt.judge.training import updated

OTHER_BUFFERS = "not compared but on the first rank, for this model has buffers that only DDP broadcasts"
OTHER_LAYOUT = (
    "not compared, for what is sent depends on the order of parameters in a bucket, and the plan's is not "
    "that of DDP's first iteration"
)
NOT_REPRODUCED = (
    "eager itself does not reproduce {names}; judged at L2, by how far eager's own runs differ "
    "(torch.use_deterministic_algorithms names operations that are not deterministic)"
)
NOT_EVALUATED = "evaluation was not compared, for eager DDP fails there: {reason}"
RESUMMED = (
    "judged at L2, for the compiled graph is cut, or one backward runs through several: what gradients are "
    "summed from may have another order"
)
NOT_FINITE = "eager itself computes NaN or infinity, and the same is asked for in the same places"


class Ladder:
    """Judges the numbers of runs in one mode. All of it are collectives of all ranks.

    Args:
        reference: eager's runs.
        mode: the mode.
        exact: whether its operations run as in eager.
        ordered: whether a sum over ranks has one order only.
    """

    def __init__(self, reference: Reference, mode: Mode, *, exact: bool, ordered: bool) -> None:
        self.reference = reference
        self.mode = mode
        self.ranks = reference.bench.ranks
        self.option = reference.bench.subject.option
        self.rules = Rules(
            exact=exact,
            ordered=ordered,
            means=bool(reference.sums),
            shards=mode.is_sharded,
            ignored=reference.eager.ignored if self.option.local else frozenset(),
            unstable=reference.unstable,
            written=reference.written,
        )

    def climb(self, record: Record) -> Sheet:
        """Judge all numbers of a run.

        A gradient, or what is computed from one, that may be summed in another order and is not equal is
        judged at L2 instead.

        Args:
            record: the run, each of whose steps began from eager's state.

        Returns:
            What this rank found.
        """
        sheet = self._judged(record, self.rules)
        own = self._resummed(record, sheet) if self.rules.exact else set[str]()
        resummed = frozenset[str]().union(*self.ranks.gather(own))
        if not resummed:
            return sheet
        sheet = self._judged(record, replace(self.rules, resummed=resummed))
        for name in sorted(resummed):
            sheet.say(RESUMMED, name)
        return sheet

    def _resummed(self, record: Record, sheet: Sheet) -> set[str]:
        """Names of what is not equal, but may be summed in another order than in eager."""
        is_cut = bool(record.plan and record.plan.cuts) or self.mode.optimize_ddp == "ddp_optimizer"
        if not record.graphs or not (is_cut or self.option.forwards > 1):
            return set()
        after = {n.name for n in pairs(record, self.reference.eager) if self.rules.sums(n.kind, n.name)}
        return sheet.wrong() & after

    def _judged(self, record: Record, rules: Rules) -> Sheet:
        """Compare all numbers that both sides have, each at its levels."""
        sheet = Sheet(self.ranks.rank, buckets_of(record))
        self._remark(sheet)
        numbers = [(n, rules.levels(n.kind, n.name)) for n in pairs(record, self.reference.eager)]
        if any(self.ranks.gather(any("L2" in levels for _, levels in numbers))):
            _ = self.reference.arithmetic  # all ranks learn it together
        for number, levels in numbers:
            if reason := self._left_out(number, record):
                sheet.say(reason, number.name)
                continue
            if not bool(dense(number.eager).isfinite().all()):
                sheet.say(NOT_FINITE, number.name)
            for level in levels:
                sheet.add(level, number.step, number.name, self._compared(level, number, record))
        if record.local is not None:
            self._communicated(record, record.local, sheet)
        return sheet

    def _communicated(self, record: Record, local: RecordedStep, sheet: Sheet) -> None:
        """Compare what the last step reduced with the mean of the same step's gradients under no_sync.

        Nothing that compiled code computes otherwise can then hide what communication does. What eager does
        not reproduce says nothing when computed once more.
        """
        step, reference = len(record.steps) - 1, self.reference
        gradients = {name: local.extras[unreduced(name)] for name in record.steps[step].gradients}
        sums = reference.bench.sums(gradients, record.steps[step].state)
        eager = reference.eager.steps[step].gradients
        for name, got in record.steps[step].gradients.items():
            if got is None or name in self.rules.unstable | self.rules.ignored:
                continue
            if dense(got).shape == sums[name].total.shape:  # else the structure says so
                compared = communication(got, sums[name], self.option.comm_dtype, eager.get(name))
                sheet.add("L1", step, name, compared)

    def _remark(self, sheet: Sheet) -> None:
        """Say what eager does, and what therefore is not asked."""
        if self.reference.unstable:
            names = ", ".join(sorted(self.reference.unstable))
            sheet.notes.append(NOT_REPRODUCED.format(names=names))
        if self.reference.bench.unevaluated:
            sheet.notes.append(NOT_EVALUATED.format(reason=self.reference.bench.unevaluated))

    def _left_out(self, number: Number, record: Record) -> str:
        """Why a number is not compared; empty if it is."""
        if (
            self.option.compresses
            and record.planned
            and number.kind in (NumberKind.GRADIENT, NumberKind.FINISHED)
        ):
            return OTHER_LAYOUT
        if (
            self.mode.gives != "nothing"
            or self.reference.bench.rank == 0
            or number.kind is not NumberKind.FORWARD
        ):
            return ""
        before, *_, after = self.reference.eager.starts
        buffers = before.keys() - self.reference.eager.steps[0].gradients.keys()
        change = any(not torch.equal(before[name], after[name]) for name in buffers)
        return OTHER_BUFFERS if change and number.name != LOSS else ""

    def _compared(self, level: str, number: Number, record: Record) -> Difference:
        """Compare a number at one level."""
        if level == "L2":
            return arithmetic(number.got, self.reference.arithmetic[number.step][number.name])
        if level == "L1":
            terms = self.reference.sums[number.step][number.name]
            return communication(number.got, terms, self.option.comm_dtype, number.eager)
        if number.kind is NumberKind.PARAMETER and number.plain not in self.rules.written:
            start = record.starts[number.step][number.plain]
            gradient = record.steps[number.step].taken.get(number.plain)
            if gradient is None or gradient.shape == start.shape:  # a misshapen one is L3's to name
                return bitwise(number.got, updated(start, gradient))
        return bitwise(number.got, number.eager)
