"""The changes between a baseline and a run: from what, to what, for which case.

Invariant: anything that only the baseline or only the run has is a change. Nothing that was not measured
counts as unchanged.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ddpopt.errors import NotJudgedError, VerificationError
from ddpopt.gate.baseline import Figures
from ddpopt.judge.report.wording import count_of
from ddpopt.judge.verdict import Finding, Status, Trial, Verdict
from ddpopt.terminal.tables import names, paragraph

ABSENT = None
INTENDED = "If this is intended, update the baseline, so that a reviewer sees the change:"
ORDER_ONLY = "only the order inside the bucket"
COUNTED = ("graphs", "segments", "recompiles", "compiled by the backend", "fingerprint")
"""Figures that change where graphs break."""


@dataclass(frozen=True)
class Change:
    """One figure that changed.

    Attributes:
        case: name of the case.
        place: ``"plan"`` or a mode; empty if it concerns the whole case.
        figure: its name.
        before: the baseline's value, as text.
        now: the run's value, as text.
        remark: what is not seen from both values at once; may be empty.
    """

    case: str
    place: str
    figure: str
    before: str
    now: str
    remark: str = ""

    def __str__(self) -> str:
        said = f"{self.figure}: {self.before} before, {self.now} now"
        return f"{said} ({self.remark})" if self.remark else said


def changes(before: Figures, now: Figures) -> tuple[Change, ...]:
    """Compare a run with a baseline.

    Args:
        before: the baseline's figures.
        now: the run's figures.

    Returns:
        All changes, in the baseline's order.
    """
    return tuple(_changes((), before, now))


def _changes(path: tuple[str, ...], before: object, now: object) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in {**before, **now}:
            yield from _changes((*path, name), before.get(name, ABSENT), now.get(name, ABSENT))
    elif before != now:
        case, place, figure = (*path, "", "")[:3]
        what = figure or ("mode" if place else "case")
        yield Change(case, place, what, *_words(before, now), _remark(before, now))


def _words(before: object, now: object) -> tuple[str, str]:
    """Both values as text; for two lists, the items that only one of them has."""
    if isinstance(before, list) and isinstance(now, list) and set(before) != set(now):
        gone = [entry for entry in before if entry not in now]
        return names(gone), names([entry for entry in now if entry not in before])
    return _word(before, "absent"), _word(now, "missing")


def _remark(before: object, now: object) -> str:
    if not (isinstance(before, list) and isinstance(now, list)):
        return ""
    return ORDER_ONLY if Counter(before) == Counter(now) else ""


def _word(value: object, absent: str) -> str:
    if isinstance(value, Mapping):
        return "present"
    if isinstance(value, list):
        return names(value, len(value))
    return absent if value is ABSENT else str(value)


@dataclass(frozen=True)
class Comparison:
    """A run compared with a baseline.

    Attributes:
        baseline: file name of the baseline.
        release: release of torch, for instance ``"torch 2.13"``.
        nproc: the number of ranks.
        figures: what the run measured.
        changes: what changed.
        left_out: targets of the baseline that were not requested this time.
        updates: whether the changes are written to the baseline.
        is_new: whether there was no baseline before.
        causes: by case, where Dynamo breaks its graphs, and why.
    """

    baseline: str
    release: str
    nproc: int
    figures: Figures
    changes: tuple[Change, ...]
    left_out: tuple[str, ...] = ()
    updates: bool = False
    is_new: bool = False
    causes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 if nothing changed or all is new, 1 if something changed, 3 if nothing was measured."""
        if self.is_new and self.updates:
            return 0
        if self.changes:
            return VerificationError.exit_code
        return 0 if self.figures else NotJudgedError.exit_code

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        if self.is_new:
            return "NEW" if self.updates else "NOT WRITTEN"
        return "CHANGED" if self.changes else "UNCHANGED"

    @property
    def shown(self) -> Sequence[Change]:
        """The changes to show: none where all is new."""
        return () if self.is_new else self.changes

    @property
    def advice(self) -> tuple[str, str] | None:
        """What to do if the changes are intended, and the command; None if there is nothing to do."""
        if not self.shown or self.updates:
            return None
        return INTENDED, f"ddpopt gate --baseline {self.baseline} --update"

    @property
    def causes_of_changes(self) -> Mapping[str, Sequence[str]]:
        """Where graphs break now, in cases in which the number of graphs or segments changed."""
        counted = {change.case for change in self.shown if change.figure in COUNTED}
        return {case: found for case, found in self.causes.items() if case in counted and found}

    @property
    def headline(self) -> str:
        """The outcome in one line."""
        found = f"{self.word}: {count_of(len(self.shown), 'change')}" if self.shown else self.word
        measured = count_of(len(self.figures), "case") if self.figures else "nothing was measured"
        return f"{found}; {measured} against {self.baseline} ({self.release})"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield paragraph(self.headline, "  ")
        for (case, place), found in self._places.items():
            if found:
                yield f"\n{case}, {place}" if place else f"\n{case}"
            for change in found:
                first, *others = str(change).splitlines()
                yield paragraph(f"  {first}", "    ")
                yield from (f"    {line}" for line in others)
        for case, causes in self.causes_of_changes.items():
            yield f"\n{case}: where graphs break now"
            yield from (paragraph(f"  {cause}", "    ") for cause in causes)
        if self.left_out:
            yield paragraph(f"Not compared: {', '.join(self.left_out)}", "  ")
        if self.advice is not None:
            yield f"\n{paragraph(' '.join(self.advice), '  ')}"

    @property
    def _places(self) -> dict[tuple[str, str], list[Change]]:
        """Every plan and mode, with what changed there."""
        places: dict[tuple[str, str], list[Change]] = {}
        for change in self.shown:
            places.setdefault((change.case, change.place), []).append(change)
        for case, measured in self.figures.items():
            for place in measured:
                places.setdefault((case, place), [])
        return places

    def as_verdict(self) -> Verdict:
        """The comparison as a verdict, for its reports: a trial for each plan and each mode of a case."""
        trials = []
        for (case, place), found in self._places.items():
            status = Status.WRONG if found else Status.OK
            findings = tuple(Finding("gate", "the figure equals the baseline's", str(each)) for each in found)
            trials.append(Trial(case, place or "case", "default", "", status, findings=findings))
        return Verdict(self.baseline, self.nproc, tuple(trials), {"torch": self.release})

    def to_json(self) -> str:
        """The comparison as a JSON object: the changes, and everything that was measured."""
        data = {
            "passes": self.exit_code == 0,
            "baseline": self.baseline,
            "torch": self.release,
            "left_out": self.left_out,
            "outcome": self.word,
            "changes": [asdict(change) for change in self.shown],
            "causes": self.causes,
            "figures": self.figures,
        }
        return json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
