"""A verdict of several trials as grids of short marks, and the numbered reasons that the marks point to.

Thousands of trials fit a page this way, and a reason that many of them share is given once. Invariant: every
trial has a place in a grid, and every trial that is not ok belongs to exactly one reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ddpopt.explanation.tables import Column, paragraph, table
from ddpopt.judge.verdict import Finding, Status, Trial, Verdict

LETTERS = {Status.WRONG: "W", Status.BROKEN: "B", Status.NOT_POSSIBLE: "n"}
"""What a mark begins with, in the order in which reasons are listed."""

OK = "ok"
NOT_RUN = "."
VARYING = re.compile(r"0x[0-9a-f]+|\d+")
"""Addresses, ports and process ids: reasons that differ in nothing else are one reason."""


@dataclass(frozen=True)
class Reason:
    """Why some trials are not ok.

    Attributes:
        mark: ``"W1"``, ``"B1"``, ``"n1"``, …: what the grids show.
        status: of all its trials.
        text: why it was not possible, or what broke, as the first trial has it; empty if claims say it.
        claims: level and claim of what does not hold, each once.
        trials: those that it holds for.
    """

    mark: str
    status: Status
    text: str
    claims: tuple[tuple[str, str], ...]
    trials: tuple[Trial, ...]

    @property
    def findings(self) -> tuple[tuple[Trial, Finding], ...]:
        """All findings, with the trial of each."""
        return tuple((trial, finding) for trial in self.trials for finding in trial.findings)


@dataclass(frozen=True)
class Cell:
    """What a grid shows of a trial."""

    mark: str
    trial: Trial


@dataclass(frozen=True)
class Grid:
    """The trials of one case, or of all cases where there is one option.

    Attributes:
        title: the case, or the option.
        rows: for each option or case its name and one cell for each mode; None where nothing ran.
    """

    title: str
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True)
class Overview:
    """All trials of a verdict.

    Attributes:
        down: what rows are: ``"option"``, or ``"case"`` where there is one option.
        columns: the modes, with their backends; the same in all grids.
        grids: one for each value of the third coordinate.
        reasons: what is wrong first, then what broke, then what is not possible.
    """

    down: str
    columns: tuple[str, ...]
    grids: tuple[Grid, ...]
    reasons: tuple[Reason, ...]


def overview(verdict: Verdict) -> Overview:
    """Arrange all trials: modes across, options down, and one grid for each case.

    Where there is one option, cases take its place.

    Args:
        verdict: with any number of trials.

    Returns:
        The grids and their reasons.
    """
    trials = verdict.trials
    reasons = _reasons(trials)
    marks = {id(trial): reason.mark for reason in reasons for trial in reason.trials}
    down, apart = ("option", "case") if len({trial.option for trial in trials}) > 1 else ("case", "option")
    columns: dict[str, None] = {}
    grids: dict[str, dict[str, dict[str, Cell]]] = {}
    for trial in trials:
        column = f"{trial.mode}, {trial.backend}" if trial.backend else trial.mode
        columns[column] = None
        row = grids.setdefault(getattr(trial, apart), {}).setdefault(getattr(trial, down), {})
        row[column] = Cell(marks.get(id(trial), OK), trial)
    return Overview(
        down,
        tuple(columns),
        tuple(
            Grid(
                f"{apart} {title}", tuple((name, tuple(map(row.get, columns))) for name, row in rows.items())
            )
            for title, rows in grids.items()
        ),
        reasons,
    )


def _reasons(trials: Iterable[Trial]) -> tuple[Reason, ...]:
    alike: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        if trial.status is not Status.OK:
            key = trial.status, VARYING.sub("#", trial.reason), frozenset(_claims(trial))
            alike.setdefault(key, []).append(trial)
    reasons = []
    for status, letter in LETTERS.items():
        groups = [group for group in alike.values() if group[0].status is status]
        for place, group in enumerate(groups, 1):
            first = group[0]
            reasons.append(Reason(f"{letter}{place}", status, first.reason, _claims(first), tuple(group)))
    return tuple(reasons)


def _claims(trial: Trial) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((finding.level, finding.claim) for finding in trial.findings))


def matrix_text(view: Overview) -> Iterator[str]:
    """Draw the grids.

    Args:
        view: of a verdict.

    Yields:
        Which letter is which mode and how its trials ended, each grid, and what the marks mean.
    """
    letters = [chr(ord("a") + index) for index in range(len(view.columns))]
    ends: list[Counter[Status]] = [Counter() for _ in letters]
    for grid in view.grids:
        for _, cells in grid.rows:
            for counter, cell in zip(ends, cells, strict=True):
                counter.update([cell.trial.status] if cell else [])
    rows = [
        (letter, name, *(counter[status] or "-" for status in Status))
        for letter, name, counter in zip(letters, view.columns, ends, strict=True)
    ]
    columns = [Column("", "right"), Column("mode", fills=True)]
    yield table([*columns, *(Column(status, "right") for status in Status)], rows)
    for grid in view.grids:
        marks = [(name, *(cell.mark if cell else NOT_RUN for cell in cells)) for name, cells in grid.rows]
        columns = [Column(view.down, fills=True), *(Column(letter, "right") for letter in letters)]
        yield f"{grid.title}\n{table(columns, marks)}"
    if view.reasons:
        letters_used = {reason.status: LETTERS[reason.status] for reason in view.reasons}
        meanings = ", ".join(f"{letter} {status}" for status, letter in letters_used.items())
        yield paragraph(f"{meanings}, with the number of the reason below; {NOT_RUN} did not run", "  ")
