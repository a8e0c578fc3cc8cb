"""The changes between a baseline and a run: from what, to what, for which case.

Invariant: anything that only the baseline or only the run has is a change. Nothing that was not measured
counts as unchanged.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from ddpopt.errors import NotJudgedError, VerificationError
from ddpopt.explanation.tables import names, paragraph
from ddpopt.gate.baseline import Figures
from ddpopt.judge.report.wording import count_of
from ddpopt.judge.verdict import Finding, Status, Trial, Verdict

ABSENT = None
ADVICE = (
    "If this is intended, update the baseline, so that a reviewer sees the change: ddpopt gate --baseline "
    "{baseline} --update"
)


@dataclass(frozen=True)
class Change:
    """One figure that changed.

    Attributes:
        case: name of the case.
        place: ``"plan"`` or a mode; empty if it concerns the whole case.
        figure: its name.
        before: the baseline's value, as text.
        now: the run's value, as text.
    """

    case: str
    place: str
    figure: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.figure}: {self.before} before, {self.now} now"


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
        yield Change(case, place, what, *_words(before, now))


def _words(before: object, now: object) -> tuple[str, str]:
    """Both values as text; for two lists, the items that only one of them has."""
    if isinstance(before, list) and isinstance(now, list) and set(before) != set(now):
        gone = [entry for entry in before if entry not in now]
        return names(gone), names([entry for entry in now if entry not in before])
    return _word(before, "absent"), _word(now, "missing")


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
    """

    baseline: str
    release: str
    nproc: int
    figures: Figures
    changes: tuple[Change, ...]
    left_out: tuple[str, ...] = ()
    updates: bool = False

    @property
    def exit_code(self) -> int:
        """0 if nothing changed, 1 if something did, 3 if nothing was measured."""
        if self.changes:
            return VerificationError.exit_code
        return 0 if self.figures else NotJudgedError.exit_code

    @property
    def headline(self) -> str:
        """The outcome in one line."""
        found = f"CHANGED: {count_of(len(self.changes), 'change')}" if self.changes else "UNCHANGED"
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
        if self.left_out:
            yield paragraph(f"Not compared: {', '.join(self.left_out)}", "  ")
        if self.changes and not self.updates:
            yield f"\n{paragraph(ADVICE.format(baseline=self.baseline), '  ')}"

    @property
    def _places(self) -> dict[tuple[str, str], list[Change]]:
        """Every plan and mode, with what changed there."""
        places: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
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
            "changes": [asdict(change) for change in self.changes],
            "figures": self.figures,
        }
        return json.dumps(data, indent=2, sort_keys=True, allow_nan=False)
