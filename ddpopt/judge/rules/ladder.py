"""The numeric ladder: compares every number of a run with eager DDP's, at the level that the rules assign.

Each rank writes its findings on a sheet; the sheets are merged at the end. Invariant: every number that eager
leaves is judged at one level at least, or a remark names it with the reason; and all ranks enter the same
collectives.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from ddpopt.errors import numbered
from ddpopt.judge.compare import Difference, Region, bitwise, communication, dense
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.rules.arithmetic import arithmetic
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.rules.updates import rounding_of_updates
from ddpopt.judge.training.moments import EXTRAS, TWO_BACKWARDS
from ddpopt.judge.training.record import (
    BUFFER,
    FINAL,
    LOSS,
    PARAMETER,
    SEEN,
    STATE,
    Number,
    NumberKind,
    Record,
    RecordedStep,
    Rules,
    alike,
    buckets_of,
    labeled,
    pairs,
    plain,
    unreduced,
)
from ddpopt.judge.training.updating import repeated
from ddpopt.judge.training.visible import GRADIENT_OF, KEPT
from ddpopt.judge.verdict import Finding, Measured

OTHER_BUFFERS = "compared only on the first rank, because this model has buffers that only DDP broadcasts"
NOT_REPRODUCED = (
    "eager itself does not reproduce {names}; judged at L2, by how far eager's own runs differ "
    "(torch.use_deterministic_algorithms names operations that are not deterministic)"
)
NOT_EVALUATED = "evaluation was not compared, because eager DDP fails in it: {reason}"
NOT_TAKEN = "an extra step was left out, because eager DDP fails in it: {name}: {reason}"
GIVEN_UP = (
    "Dynamo's recompile limit was reached: from then on a part of the model ran uncompiled, and was judged "
    "like that (TORCH_LOGS=recompiles shows why it was compiled again and again)"
)
TOO_DEAR = "extra steps were left out, as each may have to compile one more graph: {names}"
RESUMMED = (
    "judged at L2, because the compiled graph is cut, one backward runs through several, or reduced "
    "gradients are added up: gradients may be summed in a different order"
)
NOT_FINITE = "eager itself computes NaN or infinity, and the same values are expected in the same places"
CLAIM = {
    "L0": "bit for bit what eager DDP computes",
    "L1": "within the rounding of a sum over ranks",
    "L2": "as accurate as eager, up to rounding",
}
BY_OPTIMIZER = "bit for bit what the optimizer computes from the gradient"
NOT_APART = "a captured step has no unreduced gradients, so reduced ones were not compared with their mean"


class Ladder:
    """Judges the numbers of runs in one mode. All methods are collectives of all ranks.

    Args:
        reference: eager's runs.
        mode: the mode.
        exact: whether its operations run as in eager.
        ordered: whether a sum over ranks has only one order.
    """

    def __init__(self, reference: Reference, mode: Engine, *, exact: bool, ordered: bool) -> None:
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

    def climb(self, record: Record) -> "Sheet":
        """Judge all numbers of a run.

        A gradient, or a number computed from one, is judged at L2 instead if it may be summed in another
        order and is not equal.

        Args:
            record: the run; each of its steps began from eager's state.

        Returns:
            What this rank found.
        """
        self.updated = repeated(record)
        if record.captures_update and not self.rules.exact:
            self.rules = replace(self.rules, compiled_update=True)
            self.rounding = rounding_of_updates(record)
        sheet = self._judged(record, self.rules)
        own = self._resummed(record, sheet) if self.rules.exact else set[str]()
        resummed = frozenset[str]().union(*self.ranks.gather(own))
        if not resummed:
            return sheet
        sheet = self._judged(record, replace(self.rules, resummed=resummed))
        for name in sorted(resummed):
            sheet.say(RESUMMED, name)
        return sheet

    def _resummed(self, record: Record, sheet: "Sheet") -> set[str]:
        """Labels of numbers that are not equal, but may be summed in another order than in eager."""
        sums = [n for n in pairs(record, self.reference.eager) if self.rules.sums(n.kind, n.name)]
        # DDP reduces again what it has accumulated; others may reduce what is new, and add that
        after = set() if self.mode.observable else {n.label for n in sums if n.moment == TWO_BACKWARDS}
        is_cut = bool(record.plan and record.plan.cuts) or self.mode.optimize_ddp == "ddp_optimizer"
        if record.graphs and (is_cut or self.option.forwards > 1):
            after |= {number.label for number in sums}
        return sheet.wrong() & after

    def _judged(self, record: Record, rules: Rules) -> "Sheet":
        """Compare all numbers that both sides have, each at its levels."""
        sheet = Sheet(self.ranks.rank, buckets_of(record))
        self._remark(record, sheet)
        numbers = [(number, rules.levels(number)) for number in pairs(record, self.reference.eager)]
        if any(self.ranks.gather(any("L2" in levels for _, levels in numbers))):
            _ = self.reference.arithmetic  # a collective of all ranks
        for number, levels in numbers:
            if reason := self._left_out(number):
                sheet.say(reason, number.name)
                continue
            if not bool(dense(number.eager).isfinite().all()):
                sheet.say(NOT_FINITE, number.name)
            for level in levels:
                sheet.add(level, number, self._compared(level, number))
        self._optimized(record, sheet)
        if record.captures_step and not self.rules.exact:
            sheet.notes.append(NOT_APART)
        elif record.local is not None:
            self._communicated(record, record.local, sheet)
        return sheet

    def _optimized(self, record: Record, sheet: "Sheet") -> None:
        """Compare the optimizer's state with what the gradients of this run make of it."""
        for place, (step, updated) in enumerate(zip(record.steps, self.updated, strict=False)):
            for name, expected in updated.state.items():
                got = step.optimizer.get(name)
                if got is not None and alike(got, expected):
                    number = Number(place, step.moment, STATE + name, NumberKind.PARAMETER, got, expected)
                    (level,) = self.rules.levels(number)
                    sheet.add(level, number, self._updated(number, expected))

    def _communicated(self, record: Record, local: RecordedStep, sheet: "Sheet") -> None:
        """Compare the gradients that the last step reduced with the mean of the same step's under no_sync.

        Differences in compiled arithmetic then cannot hide faults of communication. Numbers that eager does
        not reproduce are skipped.
        """
        step = len(record.steps) - 1
        reference = self.reference
        gradients = {name: local.extras[unreduced(name)] for name in record.steps[step].gradients}
        sums = reference.bench.sums(gradients, record.steps[step].state)
        eager = reference.eager.steps[step].gradients
        for name, got in record.steps[step].gradients.items():
            if got is None or name in self.rules.unstable | self.rules.ignored:
                continue
            if dense(got).shape == sums[name].total.shape:  # else L3 reports it
                compared = communication(got, sums[name], self.option.comm_dtype, eager.get(name))
                number = Number(step, f"step {step}", name, NumberKind.GRADIENT, got, got)
                sheet.add("L1", number, compared)

    def _remark(self, record: Record, sheet: "Sheet") -> None:
        """Note peculiarities of eager, and which checks are therefore left out."""
        if self.reference.unstable:
            names = ", ".join(sorted(self.reference.unstable))
            sheet.notes.append(NOT_REPRODUCED.format(names=names))
        if record.given_up:
            sheet.notes.append(GIVEN_UP)
        if self.reference.bench.unevaluated:
            sheet.notes.append(NOT_EVALUATED.format(reason=self.reference.bench.unevaluated))
        for name, reason in self.reference.bench.not_taken.items():
            sheet.notes.append(NOT_TAKEN.format(name=name, reason=reason))
        if missing := [name for name in self.reference.eager.extras if name not in record.extras]:
            sheet.notes.append(TOO_DEAR.format(names=", ".join(missing)))

    def _left_out(self, number: Number) -> str:
        """Return why a number is not compared; empty if it is."""
        has_buffers = self.mode.broadcasts_buffers or self.ranks.rank == 0
        if has_buffers or number.kind is not NumberKind.FORWARD:
            return ""
        before, *_, after = self.reference.eager.starts
        buffers = before.keys() - self.reference.eager.steps[0].gradients.keys()
        change = any(not torch.equal(before[name], after[name]) for name in buffers)
        return OTHER_BUFFERS if change and number.name != LOSS else ""

    def _compared(self, level: str, number: Number) -> Difference:
        """Compare a number at one level."""
        name = plain(number.name)
        if number.kind is NumberKind.PARAMETER and name not in self.rules.written:
            return self._updated(number, self.updated[number.step].parameters.get(name, number.eager))
        if level == "L2":
            return arithmetic(number.got, self.reference.arithmetic[number.step][number.name])
        if level == "L1":
            terms = self.reference.sums[number.step][number.name]
            return communication(number.got, terms, self.option.comm_dtype, number.eager)
        return bitwise(number.got, number.eager)

    def _updated(self, number: Number, expected: Tensor) -> Difference:
        """Compare what an optimizer leaves with what it should make of this run's gradients."""
        if self.rules.compiled_update:
            return arithmetic(number.got, self.rounding[number.step][number.name])
        return bitwise(number.got, expected)


# ------------------------------------------------------------------------------------------------- sheets


@dataclass(frozen=True)
class Judged:
    """One comparison of one number.

    Attributes:
        measured: the figures.
        right: whether it passed.
        note: a remark on it.
        region: which elements are wrong.
    """

    measured: Measured
    right: bool
    note: str = ""
    region: Region | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What was judged, and at which level."""
        return self.measured.level, self.measured.parameter

    @property
    def weight(self) -> tuple[bool, int, float]:
        """Larger for worse comparisons; of wrong ones, for the first step that is wrong."""
        return not self.right, 0 if self.right else -self.measured.step, self.measured.share

    def finding(self, ranks: Sequence[int], size: int) -> Finding:
        """The finding to report if it is wrong.

        Args:
            ranks: those that found it wrong.
            size: the number of ranks.
        """
        seen = self.measured
        on = "all ranks" if len(ranks) == size > 1 else numbered("rank", ranks)
        bucket = f", bucket {seen.bucket}" if seen.bucket is not None else ""
        remark = f" ({self.note})" if self.note else ""
        by_optimizer = seen.level == "L0" and seen.parameter.startswith((PARAMETER, STATE))
        is_step = seen.moment.startswith("step ")
        moment = seen.moment if is_step else f"extra step: {seen.moment}"
        message = (
            f"{number_in_words(seen.parameter)}{bucket}, {moment}, {on}: off by {seen.error:.3g} "
            f"where {seen.bound:.3g} is allowed, {seen.ulps:.3g} ULP{remark}"
        )
        fields = asdict(seen) | {"step": seen.step if is_step else None}
        del fields["moment"]
        if self.region is not None:
            message = f"{message}; {self.region}"
            shown = self.region
            fields |= {"indices": shown.indices, "got": shown.got, "expected": shown.expected}
        claim = BY_OPTIMIZER if by_optimizer else CLAIM[seen.level]
        return Finding(claim=claim, message=message, ranks=tuple(ranks), **fields)


def number_in_words(name: str) -> str:
    """A number as the subject of a sentence."""
    if name.startswith((BUFFER, PARAMETER, SEEN, STATE)):
        return name
    return f"the {name}" if name.startswith(FINAL) else f"the gradient of {name}"


@dataclass
class Sheet:
    """One rank's findings on one trial.

    Attributes:
        rank: the rank of this process.
        buckets: by parameter, the index of the bucket that carried it.
        findings: what is wrong.
        judged: the comparisons.
        notes: remarks on the trial.
        about: remarks on numbers, each with the names that it applies to.
    """

    rank: int
    buckets: Mapping[str, int]
    findings: list[Finding] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, level: str, number: Number, difference: Difference) -> None:
        """Record the comparison of a number at one level."""
        name = number.name
        measured = Measured(
            parameter=name,
            level=level,
            bucket=self.buckets.get(plain(name)),
            ulps=difference.ulps,
            error=difference.error,
            bound=difference.bound,
            rank=self.rank,
            step=number.step,
            moment=number.moment,
        )
        self.judged.append(Judged(measured, difference.right, difference.note, difference.region))
        if difference.note and difference.right:
            self.say(difference.note, name)

    def say(self, remark: str, name: str) -> None:
        """Add a remark on a number."""
        self.about.setdefault(remark, {})[name] = None

    def wrong(self) -> set[str]:
        """Labels of the numbers that are wrong."""
        wrong = (item.measured for item in self.judged if not item.right)
        return {labeled(one.parameter, one.moment, is_extra=one.moment in EXTRAS) for one in wrong}

    def with_more(self, other: "Sheet") -> "Sheet":
        """This sheet with what another one of the same rank has, which is later."""
        sheet = replace(other, findings=[*self.findings, *other.findings], notes=[*self.notes, *other.notes])
        sheet.judged = worst([*self.judged, *other.judged])
        sheet.about = {**self.about}
        for remark, names in other.about.items():
            sheet.about[remark] = {**self.about.get(remark, {}), **names}
        return sheet

    def in_short(self) -> "Sheet":
        """The sheet with only the worst comparison of each number and level."""
        return replace(self, judged=worst(self.judged))


def worst(items: Iterable[Judged]) -> list[Judged]:
    """The worst comparison for each number and level."""
    found: dict[tuple[str, str], Judged] = {}
    for item in items:
        if item.key not in found or item.weight > found[item.key].weight:
            found[item.key] = item
    return list(found.values())


def remarks(sheets: Sequence[Sheet]) -> tuple[str, ...]:
    """All remarks of all ranks, once each."""
    names: dict[str, dict[str, None]] = {}
    for sheet in sheets:
        for remark, of in sheet.about.items():
            names.setdefault(remark, {}).update(of)
    notes = dict.fromkeys(note for sheet in sheets for note in sheet.notes)
    return (*notes, *(f"{remark}: {', '.join(of)}" for remark, of in names.items()))


def findings(sheets: Sequence[Sheet], judged: Sequence[Judged], ready: Sequence[str]) -> tuple[Finding, ...]:
    """Everything that is wrong; equal findings of several ranks appear once.

    What is nearest to the fault comes first: what concerns the run, the forward, then gradients in the order
    in which backward completes them, then what follows from them.

    Args:
        sheets: of all ranks.
        judged: the comparisons.
        ready: names of the parameters in ready order.
    """
    said = [finding for sheet in sheets for finding in sheet.findings]
    ranks: dict[tuple[str, str], list[int]] = {}
    for sheet in sheets:
        for item in sheet.judged:
            if not item.right:
                ranks.setdefault(item.key, []).append(sheet.rank)
    said += [item.finding(ranks[item.key], len(sheets)) for item in judged if not item.right]
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in said:
        seen.setdefault((finding.level, finding.claim, finding.message), finding)
    places = {name: place for place, name in enumerate(ready)}

    def distance(finding: Finding) -> tuple[int, int]:
        name = finding.parameter or ""
        late = name.startswith((PARAMETER, STATE, FINAL, SEEN + GRADIENT_OF, SEEN + KEPT))
        return 2 * late + (name in places), places.get(plain(name), len(places))

    return tuple(sorted(seen.values(), key=distance))
