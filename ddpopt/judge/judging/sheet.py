"""What ranks find out of one trial, and the words for it: comparisons, findings, remarks.

Invariant: of each number and level the worst comparison is kept, and every remark on any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddpopt.judge.compare import Difference
from ddpopt.judge.judging.numbers import BUFFER, FINAL, PARAMETER, SEEN, Number
from ddpopt.judge.verdict import Finding, Measured

CLAIM = {
    "L0": "bit by bit what eager DDP computes",
    "L1": "within the rounding of a sum over ranks",
    "L2": "as right as eager, as far as rounding goes",
}
BY_OPTIMIZER = "bit by bit what the optimizer makes of the gradient"
NEVER = 2**31


@dataclass(frozen=True)
class Judged:
    """One comparison of one number.

    Attributes:
        measured: its numbers.
        right: whether it passed.
        note: a remark on it.
        claim: what was to hold.
    """

    measured: Measured
    right: bool
    note: str = ""
    claim: str = ""

    @property
    def weight(self) -> tuple[bool, float]:
        """Larger for what is worse."""
        if self.measured.bound > 0:
            return not self.right, self.measured.error / self.measured.bound
        return not self.right, float("inf") if self.measured.error > 0 else 0.0

    def finding(self) -> Finding:
        """What is to be said of it, if it is wrong."""
        seen = self.measured
        bucket = f", bucket {seen.bucket}" if seen.bucket is not None else ""
        remark = f" ({self.note})" if self.note else ""
        return Finding(
            seen.level,
            self.claim,
            f"{_what(seen.parameter)}{bucket}, step {seen.step}, rank {seen.rank}: off by {seen.error:.3g} "
            f"where {seen.bound:.3g} is allowed, {seen.ulps:.3g} ULP{remark}",
            rank=seen.rank,
            step=seen.step,
            parameter=seen.parameter,
            bucket=seen.bucket,
            ulps=seen.ulps,
            error=seen.error,
            bound=seen.bound,
        )


def _what(name: str) -> str:
    if name.startswith((BUFFER, PARAMETER, SEEN)):
        return name
    return f"the {name}" if name.startswith(FINAL) else f"the gradient of {name}"


@dataclass
class Sheet:
    """What one rank found out of one trial.

    Attributes:
        findings: what is wrong.
        judged: the comparisons.
        levels: the levels applied.
        notes: remarks on the trial.
        about: remarks on numbers, each with the names that it holds for.
    """

    findings: list[Finding] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    levels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, None]] = field(default_factory=dict)

    def apply(self, level: str) -> None:
        """Note that a level was applied."""
        if level not in self.levels:
            self.levels.append(level)

    def add(self, level: str, number: Number, difference: Difference, rank: int, bucket: int | None) -> None:
        """Note a comparison.

        Args:
            level: which one.
            number: of what.
            difference: how it went.
            rank: of this process.
            bucket: index of the bucket that carried it.
        """
        self.apply(level)
        by_optimizer = level == "L0" and number.name.startswith(PARAMETER)
        measured = Measured(
            number.name,
            level,
            bucket,
            difference.ulps,
            difference.error,
            difference.bound,
            rank,
            number.step,
        )
        claim = BY_OPTIMIZER if by_optimizer else CLAIM[level]
        self.judged.append(Judged(measured, difference.right, difference.note, claim))
        if difference.note and difference.right:
            self.say(difference.note, number.name)

    def say(self, remark: str, name: str) -> None:
        """Remark on a number."""
        self.about.setdefault(remark, {})[name] = None

    def first_wrong(self) -> int:
        """The first step with anything wrong; `NEVER` if there is none."""
        return min((item.measured.step for item in self.judged if not item.right), default=NEVER)

    def wrong_gradients(self, until: int = NEVER) -> set[str]:
        """Names of the gradients that are wrong, up to a step."""
        words = (BUFFER, PARAMETER, SEEN, FINAL)
        found = (item.measured for item in self.judged if not item.right and item.measured.step <= until)
        return {seen.parameter for seen in found if not seen.parameter.startswith(words)}

    def forget_after(self, step: int) -> None:
        """Drop what later steps get wrong: it follows from it."""
        self.judged[:] = [item for item in self.judged if item.measured.step <= step or item.right]

    def take(self, other: Sheet) -> None:
        """Add the findings and the comparisons of another run."""
        self.findings += [finding for finding in other.findings if finding not in self.findings]
        self.judged += other.judged

    def in_short(self) -> Sheet:
        """The same with the worst comparison of each number and level alone."""
        return Sheet(self.findings, worst(self.judged), self.levels, self.notes, self.about)


def worst(items: Iterable[Judged]) -> list[Judged]:
    """For each number and level the worst of some comparisons."""
    found: dict[tuple[str, str], Judged] = {}
    for item in items:
        key = (item.measured.level, item.measured.parameter)
        if key not in found or item.weight > found[key].weight:
            found[key] = item
    return list(found.values())


def remarks(sheets: Sequence[Sheet]) -> tuple[str, ...]:
    """All remarks of all ranks, once each."""
    names: dict[str, dict[str, None]] = {}
    for sheet in sheets:
        for remark, of in sheet.about.items():
            names.setdefault(remark, {}).update(of)
    notes = dict.fromkeys(note for sheet in sheets for note in sheet.notes)
    return (*notes, *(f"{remark}: {', '.join(of)}" for remark, of in names.items()))


def findings(sheets: Sequence[Sheet], judged: Sequence[Judged]) -> tuple[Finding, ...]:
    """All that is wrong; what several ranks say in the same words, once."""
    said = [finding for sheet in sheets for finding in sheet.findings]
    said += [item.finding() for item in judged if not item.right]
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in said:
        seen.setdefault((finding.level, finding.claim, finding.message), finding)
    return tuple(seen.values())
