"""The numeric ladder: every number of a run held against eager DDP's, at the level that its rules name.

Invariant: every number that eager leaves is judged at one level at least, or a remark names it with
the reason; and all ranks enter the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ddpopt.judge.compare import Difference, bitwise
from ddpopt.judge.judging.arithmetic import arithmetic
from ddpopt.judge.judging.numbers import BUFFER, LOSS, Kind, Number, pairs
from ddpopt.judge.judging.probe import buckets_of, probe, same_starts
from ddpopt.judge.judging.reassociation import Reassociated, reassociated, together
from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Reference, reduced
from ddpopt.judge.judging.rules import Rules
from ddpopt.judge.judging.sheet import NEVER, Sheet
from ddpopt.judge.modes import Mode
from ddpopt.judge.training import updated
from ddpopt.judge.verdict import Finding

OTHER_BUFFERS = "not compared but on the first rank, for only DDP broadcasts buffers"
OTHER_LAYOUT = (
    "not compared, for what is sent depends on the order of parameters in a bucket, and the reducer's "
    "buckets are not those of eager DDP"
)
OTHER_STARTS = "L1 was not applied to all steps: they no longer start from eager's parameters"
NO_MEANS = "L1 was not applied: under this option a gradient is no mean over ranks"
NOT_REPRODUCED = (
    "eager itself does not reproduce {names}; judged at L2, by how far eager's own runs differ "
    "(torch.use_deterministic_algorithms names operations that are not deterministic)"
)
NOT_EVALUATED = "evaluation was not compared, for eager DDP fails there: {reason}"
NOT_FINITE = "eager itself computes NaN or infinity, and the same is asked for in the same places"


class Ladder:
    """Judges the numbers of runs in one mode. All of it are collectives of all ranks.

    Args:
        reference: eager's runs.
        mode: the mode.
        exact: whether its operations run as in eager.
        ordered: whether a sum over ranks has one order only.
        run_again: runs the mode once more, each step from eager's state; None if that fails.

    Attributes:
        stalled: how the mode failed by time alone when it was run once more; empty if it did not.
    """

    def __init__(
        self,
        reference: Reference,
        mode: Mode,
        *,
        exact: bool,
        ordered: bool,
        run_again: Callable[[], Record | None],
    ) -> None:
        self.reference = reference
        self.mode = mode
        self.run_again = run_again
        self.stalled = ""
        self.ranks = reference.bench.ranks
        self.option = reference.bench.subject.option
        self.rules = Rules(
            exact=exact,
            ordered=ordered,
            means=reference.sums is not None,
            shards=self.option.norms and mode.is_sharded,
            finishes=self.option.finish_step is not None,
            ignored=frozenset() if self.option.others else reference.eager.ignored,
            unstable=reference.unstable,
            written=reference.written,
        )

    def climb(self, record: Record) -> Sheet:
        """Judge all numbers of a run.

        What is not equal, but may be summed in another order, is judged at L2 instead. Later steps went on
        from it, so the mode is run again, with each step from eager's state. What no order explains of the
        first run up to there stays: it may not happen again.

        Args:
            record: the run.

        Returns:
            What this rank found.
        """
        sheet = self._judged(record, self.rules)
        # Every rank looks, also one that saw nothing wrong: what follows has collectives.
        first = min(self.ranks.gather(sheet.first_wrong())) if self.rules.exact else NEVER
        if first == NEVER:
            return sheet
        moved = together(self.ranks.gather(reassociated(self.reference.bench, self.mode.name, record.plan)))
        excused = self._excused(sheet, moved, first)
        apart = Sheet()
        if excused and record.follow is None:
            apart = self._unexplained(record, excused, first)
            again = self.run_again()
            if again is None:
                self.stalled = self.reference.bench.stalled
                if self.stalled:
                    return apart
                sheet.findings += self._failures()
                return sheet
            record, first = again, NEVER
            sheet = self._judged(record, self.rules)
            excused = self._excused(sheet, moved, first)
        if excused:
            sheet = self._judged(record, replace(self.rules, excused=excused))
            sheet.notes.append(
                f"{moved.why}, hence judged at L2: the gradients of {', '.join(moved.values)}, and of "
                "parameters behind them"
            )
        elif record.follow is None:
            sheet.forget_after(first)
        sheet.take(apart)
        sheet.notes += moved.unproved
        return sheet

    def _unexplained(self, record: Record, excused: frozenset[str], until: int) -> Sheet:
        """What is wrong with a run in whatever order it sums, up to a step that began as eager's did."""
        sheet = self._judged(record, replace(self.rules, excused=excused))
        sheet.judged = [item for item in sheet.judged if not item.right and item.measured.step <= until]
        return sheet

    def _excused(self, sheet: Sheet, moved: Reassociated, until: int) -> frozenset[str]:
        wrong = sheet.wrong_gradients(until) & moved.reached
        return frozenset[str]().union(*self.ranks.gather(wrong))

    def _failures(self) -> Iterator[Finding]:
        for failure in self.reference.bench.failures:
            message = f"run again from eager's states it fails: {failure.text}"
            yield Finding("run", "the step runs", message, rank=failure.rank)

    def _judged(self, record: Record, rules: Rules) -> Sheet:
        """Compare all numbers that both sides have, each at its levels."""
        sheet = Sheet()
        self._remark(sheet)
        if rules.need_rounding:
            _ = self.reference.arithmetic  # all ranks learn it together
        other_layout, buckets = self._other_layout(record), buckets_of(record)
        alike = same_starts(record, self.reference.eager)
        for number in pairs(record, self.reference.eager):
            reason = self._left_out(number, other_layout)
            levels = () if reason else rules.levels(number.kind, number.name)
            for level in levels:
                if level != "L1" or alike[number.step]:
                    difference = self._compared(level, number, record)
                    sheet.add(level, number, difference, self.ranks.rank, buckets.get(number.plain))
            if reason:
                sheet.say(reason, number.name)
        if not all(alike):
            sheet.notes.append(OTHER_STARTS)
        if record.local is not None:
            probe(self.reference, record, rules, sheet)
        return sheet

    def _remark(self, sheet: Sheet) -> None:
        """Say what eager does, and what therefore is not asked."""
        if self.reference.unstable:
            names = ", ".join(sorted(self.reference.unstable))
            sheet.notes.append(NOT_REPRODUCED.format(names=names))
        if self.reference.bench.unevaluated:
            sheet.notes.append(NOT_EVALUATED.format(reason=self.reference.bench.unevaluated))
        for name in self.reference.not_finite:
            sheet.say(NOT_FINITE, name)
        if self.rules.exact and not self.rules.ordered and not self.rules.means:
            sheet.notes.append(NO_MEANS)

    def _other_layout(self, record: Record) -> bool:
        if not self.option.by_layout:
            return False
        return any(self.ranks.gather(_layout(record) != _layout(self.reference.eager)))

    def _left_out(self, number: Number, other_layout: bool) -> str:
        """Why a number is not compared; empty if it is."""
        if other_layout and number.kind in (Kind.GRADIENT, Kind.FINISHED):
            return OTHER_LAYOUT
        if self.mode.gives != "nothing" or self.reference.bench.rank == 0:
            return ""
        if number.name.startswith(BUFFER):
            before = self.reference.eager.starts[number.step][number.plain]
            return "" if torch.equal(before, number.eager) else OTHER_BUFFERS
        is_seen = number.kind is Kind.FORWARD and number.name != LOSS
        return OTHER_BUFFERS if is_seen and self._broadcast_matters(number.step) else ""

    def _broadcast_matters(self, step: int) -> bool:
        """Whether this rank starts a step of eager DDP with other buffers than the first rank."""
        peers, trained = self.reference.eager_peers, self.reference.eager.steps[0].gradients
        if step == 0:
            return False  # all ranks start alike
        own, first = (peers[rank].states[step - 1] for rank in (self.reference.bench.rank, 0))
        return any(own[name] != first[name] for name in own.keys() - trained.keys())

    def _compared(self, level: str, number: Number, record: Record) -> Difference:
        """Compare a number at one level."""
        if level == "L2":
            return arithmetic(number.got, self.reference.arithmetic[number.step][number.name])
        if level == "L1":
            return self._mean(number)
        if level == "L0" and number.kind is Kind.PARAMETER and number.plain not in self.rules.written:
            start = record.starts[number.step][number.plain]
            gradient = record.steps[number.step].taken.get(number.plain)
            if gradient is None or gradient.shape == start.shape:  # a misshapen one is L3's to name
                return bitwise(number.got, updated(start, gradient))
        return bitwise(number.got, number.eager)

    def _mean(self, number: Number) -> Difference:
        """L1 of a gradient; where it is eager's own, what is known of that."""
        if number.got.layout is torch.strided and torch.equal(number.got, number.eager):
            return self.reference.reduction(number.step, number.name)
        terms = self.reference.terms(number.step, number.name)
        return reduced(number.got, terms, self.option.comm_dtype, number.eager)


def _layout(record: Record) -> list[list[tuple[str, ...]]]:
    """The buckets of each synchronised backward."""
    return [[tuple(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
