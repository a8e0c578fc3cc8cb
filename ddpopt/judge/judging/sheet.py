"""What ranks find out of one trial, and the words for it: comparisons, findings, remarks.

Invariant: of each number and level the worst comparison is kept, and every remark on any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ddpopt.judge.compare import Difference
from ddpopt.judge.judging.numbers import BUFFER, FINAL, PARAMETER, SEEN, plain
from ddpopt.judge.verdict import Finding, Measured

CLAIM = {
    "L0": "bit by bit what eager DDP computes",
    "L1": "within the rounding of a sum over ranks",
    "L2": "as right as eager, as far as rounding goes",
}
BY_OPTIMIZER = "bit by bit what the optimizer makes of the gradient"


def _finding(wrong: Measured) -> Finding:
    """What is to be said of a comparison that did not pass."""
    bucket = f", bucket {wrong.bucket}" if wrong.bucket is not None else ""
    remark = f" ({wrong.note})" if wrong.note else ""
    by_optimizer = wrong.level == "L0" and wrong.parameter.startswith(PARAMETER)
    return Finding(
        wrong.level,
        BY_OPTIMIZER if by_optimizer else CLAIM[wrong.level],
        f"{_what(wrong.parameter)}{bucket}, step {wrong.step}, rank {wrong.rank}: off by {wrong.error:.3g} "
        f"where {wrong.bound:.3g} is allowed, {wrong.ulps:.3g} ULP{remark}",
        rank=wrong.rank,
        step=wrong.step,
        parameter=wrong.parameter,
        bucket=wrong.bucket,
        ulps=wrong.ulps,
        error=wrong.error,
        bound=wrong.bound,
    )


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
    judged: list[Measured] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, level: str, step: int, name: str, difference: Difference) -> None:
        """Note how a number compares at one level."""
        found = asdict(difference)
        bucket = self.buckets.get(plain(name))
        self.judged.append(Measured(name, level, bucket, rank=self.rank, step=step, **found))
        if difference.note and difference.right:
            self.say(difference.note, name)

    def say(self, remark: str, name: str) -> None:
        """Remark on a number."""
        self.about.setdefault(remark, {})[name] = None

    def wrong(self) -> set[str]:
        """Names of the numbers that are wrong."""
        return {item.parameter for item in self.judged if not item.right}

    def in_short(self) -> Sheet:
        """The same with the worst comparison of each number and level alone."""
        return replace(self, judged=worst(self.judged))


def worst(items: Iterable[Measured]) -> list[Measured]:
    """For each number and level the worst of some comparisons."""
    found: dict[tuple[str, str], Measured] = {}
    for item in items:
        known = found.setdefault((item.level, item.parameter), item)
        if (known.right, -known.share) > (item.right, -item.share):
            found[item.level, item.parameter] = item
    return list(found.values())


def remarks(sheets: Sequence[Sheet]) -> tuple[str, ...]:
    """All remarks of all ranks, once each."""
    names: dict[str, dict[str, None]] = {}
    for sheet in sheets:
        for remark, of in sheet.about.items():
            names.setdefault(remark, {}).update(of)
    notes = dict.fromkeys(note for sheet in sheets for note in sheet.notes)
    return (*notes, *(f"{remark}: {', '.join(of)}" for remark, of in names.items()))


def findings(sheets: Sequence[Sheet], judged: Sequence[Measured]) -> tuple[Finding, ...]:
    """All that is wrong; what several ranks say in the same words, once."""
    said = [finding for sheet in sheets for finding in sheet.findings]
    said += [_finding(item) for item in judged if not item.right]
    seen: dict[tuple[str, str, str], Finding] = {}
    for finding in said:
        seen.setdefault((finding.level, finding.claim, finding.message), finding)
    return tuple(seen.values())
