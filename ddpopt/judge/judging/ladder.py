"""The numeric ladder: every number of a run held against eager DDP's, at the level that its rules name.

Invariant: every number that eager leaves is judged at one level at least, or a remark names it with
the reason; and all ranks enter the same collectives.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ddpopt.judge.compare import Difference, bitwise, communication, dense
from ddpopt.judge.judging.arithmetic import arithmetic
from ddpopt.judge.judging.numbers import BUFFER, LOSS, Kind, Number, Rules, pairs
from ddpopt.judge.judging.reassociation import reassociated, together
from ddpopt.judge.judging.record import Record, buckets_of
from ddpopt.judge.judging.reference import Reference
from ddpopt.judge.judging.sheet import Sheet
from ddpopt.judge.modes import Mode
from ddpopt.judge.parallel import Gradients
from ddpopt.judge.training import updated
from ddpopt.judge.verdict import Finding

OTHER_BUFFERS = "not compared but on the first rank, for only DDP broadcasts buffers"
OTHER_LAYOUT = (
    "not compared, for what is sent depends on the order of parameters in a bucket, and the reducer's "
    "buckets are not those of eager DDP"
)
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
            shards=self.option.norms and mode.is_sharded,
            finishes=self.option.finish_step is not None,
            ignored=frozenset() if self.option.others else reference.eager.ignored,
            unstable=reference.unstable,
            written=reference.written,
        )

    def climb(self, record: Record) -> Sheet:
        """Judge all numbers of a run.

        What is not equal, but may be summed in another order, is judged at L2 instead.

        Args:
            record: the run, each of whose steps began from eager's state.

        Returns:
            What this rank found.
        """
        sheet = self._judged(record, self.rules)
        # Every rank looks, also one that saw nothing wrong: what follows has collectives.
        if not self.rules.exact or not any(self.ranks.gather(bool(sheet.wrong()))):
            return sheet
        moved = together(self.ranks.gather(reassociated(self.reference.bench, self.mode.name, record.plan)))
        # which gradients of inputs and of outside tensors depend on moved sums nobody knows
        own = {number.name for number in pairs(record, self.reference.eager) if number.kind is Kind.OWN}
        may_move = moved.reached | (own if moved.values else set())
        excused = frozenset[str]().union(*self.ranks.gather(sheet.wrong() & may_move))
        if excused:
            sheet = self._judged(record, replace(self.rules, excused=excused))
            sheet.notes.append(
                f"{moved.why}, hence judged at L2: the gradients of {', '.join(moved.values)}, and of "
                "the parameters that they are computed from"
            )
        sheet.notes += moved.unproved
        return sheet

    def _judged(self, record: Record, rules: Rules) -> Sheet:
        """Compare all numbers that both sides have, each at its levels."""
        sheet = Sheet(self.ranks.rank, buckets_of(record))
        self._remark(sheet)
        if rules.need_rounding:
            _ = self.reference.arithmetic  # all ranks learn it together
        other_layout = self._other_layout(record)
        for number in pairs(record, self.reference.eager):
            if reason := self._left_out(number, other_layout):
                sheet.say(reason, number.name)
                continue
            for level in rules.levels(number.kind, number.name):
                sheet.add(level, number.step, number.name, self._compared(level, number, record))
        if record.local is not None:
            self._probe(record, record.local, rules, sheet)
        return sheet

    def _probe(self, record: Record, local: Gradients, rules: Rules, sheet: Sheet) -> None:
        """Judge the last step by one more, from the same state, that nothing reduced.

        What the mode reduced is compared with the mean of the mode's own gradients, so that nothing that
        compiled code computes otherwise can hide what communication does; and these with what the model
        alone computes in eager. What eager does not reproduce says nothing when computed once more.
        """
        step, reference = len(record.steps) - 1, self.reference
        sums = reference.bench.sums(local, record.steps[step].state)
        eager = reference.eager.steps[step].gradients
        for name, got in record.steps[step].gradients.items():
            if got is None or name not in sums or name in rules.unstable | rules.ignored:
                continue
            if dense(got).shape == sums[name].total.shape:  # else the structure says so
                compared = communication(got, sums[name], self.option.comm_dtype, eager.get(name))
                sheet.add("L1", step, name, compared)
        if reference.alone is None or not rules.exact:
            return
        for name, got in local.items():
            wanted = reference.alone.steps[step].gradients.get(name)
            if got is None or wanted is None:
                if got is not wanted:
                    message = f"under no_sync the gradient of {name} is there on one side only"
                    sheet.findings.append(
                        Finding("L3", "no_sync as in eager", message, sheet.rank, step, name)
                    )
            elif name not in rules.unstable | rules.excused and dense(got).shape == dense(wanted).shape:
                sheet.add("L0", step, name, bitwise(got, wanted))

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
        if not self.option.compresses:
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
            terms = self.reference.sums[number.step][number.name]
            return communication(number.got, terms, self.option.comm_dtype, number.eager)
        if number.kind is Kind.PARAMETER and number.plain not in self.rules.written:
            start = record.starts[number.step][number.plain]
            gradient = record.steps[number.step].taken.get(number.plain)
            if gradient is None or gradient.shape == start.shape:  # a misshapen one is L3's to name
                return bitwise(number.got, updated(start, gradient))
        return bitwise(number.got, number.eager)


def _layout(record: Record) -> list[list[tuple[str, ...]]]:
    """The buckets of each synchronised backward."""
    return [[tuple(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
