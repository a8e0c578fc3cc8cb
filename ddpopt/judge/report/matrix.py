"""A verdict on several trials as grids of short marks, with numbered reasons that the marks refer to.

This fits thousands of trials on a page, and lists a reason that many share only once. Invariant: every trial
has a place in a grid, and every trial that is not ok belongs to exactly one reason.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from ddpopt.judge.verdict import Finding, Status, Trial, Verdict
from ddpopt.terminal.tables import Column, numbers, paragraph, table

LETTERS = {Status.WRONG: "W", Status.BROKEN: "B", Status.REFUSED: "r", Status.NOT_POSSIBLE: "n"}
"""The first letter of a mark, in the order in which reasons are listed."""

NOT_RUN = "."
ACROSS = 12
"""Modes that a grid has at most, so that it fits into 80 characters; others are in a grid below it."""
LEGEND = "W wrong, B broken, r refused, n not possible, with the number of the reason below; . did not run"
VARYING = re.compile(r"0x[0-9a-f]+|\d+")
"""Addresses, ports and process ids: reasons that differ only in these are one reason."""


@dataclass(frozen=True)
class Reason:
    """Why some trials are not ok.

    Attributes:
        mark: the mark in the grids: ``"W1"``, ``"B1"``, ``"n1"``, ….
        status: the status of all its trials.
        text: why it was refused, not possible or broken, from the first trial; empty if `claims` says it.
        claims: level and claim of each violation, each once.
        trials: the trials with this reason.
    """

    mark: str
    status: Status
    text: str
    claims: tuple[tuple[str, str], ...]
    trials: tuple[Trial, ...]

    @property
    def findings(self) -> tuple[tuple[Trial, Finding], ...]:
        """All findings with their trials, starting with the first finding of every trial."""
        placed = [(place, t, found) for t in self.trials for place, found in enumerate(t.findings)]
        return tuple((trial, finding) for _, trial, finding in sorted(placed, key=itemgetter(0)))


@dataclass(frozen=True)
class Overview:
    """All trials of a verdict.

    Attributes:
        down: the meaning of a row: ``"option"``, or ``"case"`` if there is only one option.
        columns: the modes, with their backends and how they were judged; the same in all grids.
        grids: by title, the trials by row and column; no entry where nothing ran.
        reasons: first of wrong trials, then of broken ones, of refused ones, and of those not possible.
    """

    down: str
    columns: tuple[str, ...]
    grids: Mapping[str, Mapping[str, Mapping[str, Trial]]]
    reasons: tuple[Reason, ...]

    def marks(self) -> dict[int, str]:
        """The mark of each trial that is not ok, by its ``id``."""
        return {id(trial): reason.mark for reason in self.reasons for trial in reason.trials}


def overview(verdict: Verdict) -> Overview:
    """Arrange all trials: modes across, options down, and one grid for each case.

    If there is only one option, the rows are cases instead.

    Args:
        verdict: with any number of trials.

    Returns:
        The grids and their reasons.
    """
    options = {trial.option for trial in verdict.trials}
    down, apart = ("option", "case") if len(options) > 1 else ("case", "option")
    columns: dict[str, None] = {}
    grids: dict[str, dict[str, dict[str, Trial]]] = {}
    for trial in verdict.trials:
        backend = f", {trial.backend}" if trial.backend else ""
        column = f"{trial.mode}{backend}{trial.way}"
        columns[column] = None
        grid = grids.setdefault(f"{apart} {getattr(trial, apart)}", {})
        grid.setdefault(getattr(trial, down), {})[column] = trial
    return Overview(down, tuple(columns), grids, tuple(_reasons(verdict.trials)))


def _reasons(trials: Iterable[Trial]) -> Iterator[Reason]:
    alike: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        key = trial.status, VARYING.sub("#", trial.reason), frozenset(_claims(trial))
        alike.setdefault(key, []).append(trial)
    for status, letter in LETTERS.items():
        groups = [group for group in alike.values() if group[0].status is status]
        for place, group in enumerate(groups, 1):
            yield Reason(f"{letter}{place}", status, group[0].reason, _claims(group[0]), tuple(group))


def _claims(trial: Trial) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((finding.level, finding.claim) for finding in trial.findings))


def matrix_text(view: Overview) -> Iterator[str]:
    """Draw the grids.

    Args:
        view: the overview of a verdict.

    Yields:
        The legend of modes with their results, each grid, and the meaning of the marks.
    """
    letters = [chr(ord("a") + index) for index in range(len(view.columns))]
    rows_of_all = [row for rows in view.grids.values() for row in rows.values()]
    ends = Counter((column, trial.status) for row in rows_of_all for column, trial in row.items())
    legend = [
        (letter, column, *(ends[column, status] or "-" for status in Status))
        for letter, column in zip(letters, view.columns, strict=True)
    ]
    yield table([Column("", "right"), Column("mode"), *numbers(*Status)], legend)
    marks = {id(trial): Status.OK for row in rows_of_all for trial in row.values()} | view.marks()
    for title, rows in view.grids.items():
        for first in range(0, len(letters), ACROSS):
            part = slice(first, first + ACROSS)
            drawn = [
                (name, *(marks.get(id(row.get(column)), NOT_RUN) for column in view.columns[part]))
                for name, row in rows.items()
            ]
            yield f"{title}\n{table([Column(view.down), *numbers(*letters[part])], drawn)}"
    if view.reasons:
        yield paragraph(LEGEND, "  ")
