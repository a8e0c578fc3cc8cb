"""A verdict as grids of short marks, and the numbered reasons that the marks point to.

Thousands of trials fit a page this way, and a reason that many of them share is told once. Plain data: text,
Markdown and HTML differ only in how they draw it. Invariant: every trial has a place in a grid, and every
trial that is not ok belongs to exactly one reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
        mark: ``"W1"``, ``"B1"``, ``"n1"``, …: what stands in the grids.
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
    """Trials over two of their coordinates.

    Attributes:
        title: name and value of the third coordinate.
        rows: for each row its name and one cell for each column; None where nothing ran.
    """

    title: str
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]


@dataclass(frozen=True)
class Overview:
    """All trials of a verdict.

    Attributes:
        down: what rows are: ``"option"``, ``"case"`` or ``"mode"``.
        across: what columns are.
        columns: their names, the same in all grids.
        grids: one for each value of the third coordinate.
        reasons: what is wrong first, then what broke, then what is not possible.
    """

    down: str
    across: str
    columns: tuple[str, ...]
    grids: tuple[Grid, ...]
    reasons: tuple[Reason, ...]

    def column(self, name: str) -> list[Trial]:
        """The trials in a column, over all grids."""
        place = self.columns.index(name)
        cells = [cells[place] for grid in self.grids for _, cells in grid.rows]
        return [cell.trial for cell in cells if cell is not None]


def overview(verdict: Verdict) -> Overview:
    """Arrange all trials.

    A grid has modes across and options down, one grid for each case. Where a coordinate has one value only,
    the others take its place, the longer one down.

    Args:
        verdict: with any number of trials.

    Returns:
        The grids and their reasons.
    """
    reasons = _reasons(verdict.trials)
    marks = {id(trial): reason.mark for reason in reasons for trial in reason.trials}
    cells = [Cell(marks.get(id(trial), OK), trial) for trial in verdict.trials]
    coordinates = _coordinates(verdict.trials)
    values = {name: tuple(dict.fromkeys(map(of, verdict.trials))) for name, of in coordinates.items()}
    down, across, apart = _axes(*(len(values[name]) for name in ("case", "option", "mode")))
    grids = _grids(cells, values[across], apart, *(coordinates[axis] for axis in (down, across, apart)))
    return Overview(down, across, values[across], grids, reasons)


def _reasons(trials: Iterable[Trial]) -> tuple[Reason, ...]:
    alike: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        if trial.status is not Status.OK:
            alike.setdefault(_reason_key(trial), []).append(trial)
    reasons = []
    for status, letter in LETTERS.items():
        groups = [group for group in alike.values() if group[0].status is status]
        for place, group in enumerate(groups, 1):
            first = group[0]
            reasons.append(Reason(f"{letter}{place}", status, first.reason, _claims(first), tuple(group)))
    return tuple(reasons)


def _reason_key(trial: Trial) -> tuple[object, ...]:
    return trial.status, VARYING.sub("#", trial.reason), frozenset(_claims(trial))


def _claims(trial: Trial) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((finding.level, finding.claim) for finding in trial.findings))


Coordinate = Callable[[Trial], str]


def _coordinates(trials: Iterable[Trial]) -> dict[str, Coordinate]:
    """How trials are told apart; one that knows no backend stands in the column of its mode all the same."""
    backends: dict[str, dict[str, None]] = {}
    for trial in trials:
        if trial.backend:
            backends.setdefault(trial.mode, {})[trial.backend] = None

    def mode(trial: Trial) -> str:
        known = list(backends.get(trial.mode, ()))
        backend = known[0] if len(known) == 1 else trial.backend
        return f"{trial.mode}, {backend}" if backend else trial.mode

    return {"option": lambda trial: trial.option, "mode": mode, "case": lambda trial: trial.case}


def _axes(cases: int, options: int, modes: int) -> tuple[str, str, str]:
    """Which coordinate goes down, which across, and which makes a grid of its own."""
    if cases <= 1 and options <= 1:
        return "mode", "option", "case"
    if cases > 1 and options == 1:
        return "case", "mode", "option"
    if modes == 1 and cases > 1:
        return ("case", "option", "mode") if cases > options else ("option", "case", "mode")
    return "option", "mode", "case"


def _grids(
    cells: list[Cell],
    columns: tuple[str, ...],
    name_apart: str,
    down: Coordinate,
    across: Coordinate,
    apart: Coordinate,
) -> tuple[Grid, ...]:
    grids: dict[str, dict[str, dict[str, Cell]]] = {}
    for cell in cells:
        row = grids.setdefault(apart(cell.trial), {}).setdefault(down(cell.trial), {})
        row[across(cell.trial)] = _graver(row.get(across(cell.trial)), cell)
    return tuple(
        Grid(
            f"{name_apart} {title}",
            tuple((row, tuple(map(found.get, columns))) for row, found in rows.items()),
        )
        for title, rows in grids.items()
    )


def _graver(earlier: Cell | None, cell: Cell) -> Cell:
    """A trial that was run twice shows the worse of its ends."""
    order = [Status.OK, Status.NOT_POSSIBLE, Status.BROKEN, Status.WRONG]
    if earlier is None:
        return cell
    return max(earlier, cell, key=lambda each: order.index(each.trial.status))


def letter_of(index: int) -> str:
    """Name a column whose own name is too long for a header: a, b and so on.

    >>> letter_of(0), letter_of(25), letter_of(26)
    ('a', 'z', 'aa')
    """
    head, last = divmod(index, 26)
    return (letter_of(head - 1) if head else "") + chr(ord("a") + last)


def mark_of(cell: Cell | None) -> str:
    """What stands in a cell."""
    return cell.mark if cell else NOT_RUN
