"""What ranks find out of one trial, and the words for it: comparisons, findings, remarks.

Invariant: of each number and level the worst comparison is kept, and every remark on any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ddpopt.judge.compare import Difference
from ddpopt.judge.judging.record import BUFFER, FINAL, PARAMETER, SEEN, plain
from ddpopt.judge.verdict import Finding, Measured

CLAIM = {
    "L0": "bit by bit what eager DDP computes",
    "L1": "within the rounding of a sum over ranks",
    "L2": "as right as eager, as far as rounding goes",
}
BY_OPTIMIZER = "bit by bit what the optimizer makes of the gradient"


@dataclass(frozen=True)
class Judged:
    """One comparison of one number.

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

    def finding(self) -> Finding:
        """What is to be said of it, if it is wrong."""
        seen = self.measured
        bucket = f", bucket {seen.bucket}" if seen.bucket is not None else ""
        remark = f" ({self.note})" if self.note else ""
        by_optimizer = seen.level == "L0" and seen.parameter.startswith(PARAMETER)
        message = (
            f"{_what(seen.parameter)}{bucket}, step {seen.step}, rank {seen.rank}: off by {seen.error:.3g} "
            f"where {seen.bound:.3g} is allowed, {seen.ulps:.3g} ULP{remark}"
        )
        claim = BY_OPTIMIZER if by_optimizer else CLAIM[seen.level]
        return Finding(claim=claim, message=message, **asdict(seen))


def _what(name: str) -> str:
    if name.startswith((BUFFER, PARAMETER, SEEN)):
        return name
    return f"the {name}" if name.startswith(FINAL) else f"the gradient of {name}"


@dataclass
class Sheet:
    """What one rank found out of one trial.

    Attributes:
        rank: of this process.
        buckets: by parameter, the index of the bucket that carried it.
        findings: what is wrong.
        judged: the comparisons.
        notes: remarks on the trial.
        about: remarks on numbers, each with the names that it holds for.
    """

    rank: int
    buckets: Mapping[str, int]
    findings: list[Finding] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, level: str, step: int, name: str, difference: Difference) -> None:
        """Note how a number compares at one level."""
        measured = Measured(
            parameter=name,
            level=level,
            bucket=self.buckets.get(plain(name)),
            ulps=difference.ulps,
            error=difference.error,
            bound=difference.bound,
            rank=self.rank,
            step=step,
        )
        self.judged.append(Judged(measured, difference.right, difference.note))
        if difference.note and difference.right:
            self.say(difference.note, name)

    def say(self, remark: str, name: str) -> None:
        """Remark on a number."""
        self.about.setdefault(remark, {})[name] = None

    def wrong(self) -> set[str]:
        """Names of the numbers that are wrong."""
        return {item.measured.parameter for item in self.judged if not item.right}

    def in_short(self) -> Sheet:
        """The same with the worst comparison of each number and level alone."""
        return replace(self, judged=worst(self.judged))


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
