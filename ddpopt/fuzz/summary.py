"""What a campaign came to: how much was judged, how fast, which features, and which failures how often.

Invariant: a function of the journal alone, so that a campaign that was interrupted has the same summary.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ddpopt.fuzz.journal import Entry, Plan
from ddpopt.fuzz.questions import Kind


@dataclass(frozen=True)
class Counted:
    """A failure, and how often it was seen.

    Attributes:
        owner: the mode that it counts against, or ``"backend NAME"``.
        signature: in words.
        times: in how many models.
        first: place of the first, as ``worker/place``.
    """

    owner: str
    signature: str
    times: int
    first: str


@dataclass(frozen=True)
class Summary:
    """What a campaign came to.

    Attributes:
        plan: what was run.
        models: how many were judged.
        seconds: how long, over all runs.
        runs: how many runs.
        kinds: for each mode how many models ended how.
        features: for each feature in how many models it was.
        failures: those of modes and of backends, the most frequent first.
        refused: what was not judged, and why: ddpopt refused, eager failed, or the judge.
    """

    plan: Plan
    models: int
    seconds: float
    runs: int
    kinds: Mapping[str, Mapping[str, int]]
    features: Mapping[str, int]
    failures: tuple[Counted, ...]
    refused: Mapping[str, int]

    @property
    def rate(self) -> float:
        """Models in a second."""
        return self.models / self.seconds if self.seconds else 0.0

    @property
    def distinct(self) -> int:
        """Failures that count against a mode."""
        return sum(not failure.owner.startswith("backend ") for failure in self.failures)

    def to_json(self) -> str:
        """Return it as a JSON object."""
        return json.dumps({**asdict(self), "rate": round(self.rate, 3), "distinct": self.distinct}, indent=2)


def summarized(plan: Plan, entries: Sequence[Entry]) -> Summary:
    """Count what a journal has.

    Args:
        plan: of the campaign.
        entries: in the order in which they were written.
    """
    ends: dict[int, float] = {}
    for entry in entries:
        ends[entry.run] = max(ends.get(entry.run, 0.0), entry.at_s)
    kinds: dict[str, Counter[str]] = {mode: Counter() for mode in plan.modes}
    for entry in entries:
        for answer in entry.answers:
            kinds.setdefault(answer.mode, Counter())[answer.kind] += 1
    features = Counter(feature for entry in entries for feature in entry.features)
    return Summary(
        plan,
        len(entries),
        round(sum(ends.values()), 1),
        len(ends),
        {mode: dict(counts) for mode, counts in kinds.items()},
        dict(features.most_common()),
        _failures(plan, entries),
        _refused(entries),
    )


def _failures(plan: Plan, entries: Sequence[Entry]) -> tuple[Counted, ...]:
    times: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for entry in entries:
        seen = {
            (_owner(plan, answer.mode, answer.kind), str(answer.signature))
            for answer in entry.answers
            if answer.kind in (Kind.WRONG, Kind.BACKEND)
        }
        for key in sorted(seen):
            times[key] += 1
            first.setdefault(key, f"{entry.worker}/{entry.place}")
    return tuple(Counted(*key, count, first[key]) for key, count in times.most_common())


def _owner(plan: Plan, mode: str, kind: Kind) -> str:
    return f"backend {plan.backend}" if kind is Kind.BACKEND else mode


def _refused(entries: Sequence[Entry]) -> dict[str, int]:
    found = Counter(
        f"{answer.mode}: {answer.kind}: {answer.signature}"
        for entry in entries
        for answer in entry.answers
        if answer.kind in (Kind.REFUSED, Kind.EAGER, Kind.BROKEN)
    )
    return dict(found.most_common())
