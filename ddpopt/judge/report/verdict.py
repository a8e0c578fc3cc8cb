"""A verdict as text for a terminal or a log.

One trial is shown in full; several as grids of marks, with the reasons that the marks point to. Invariant:
the last line is the verdict, and nothing that is wrong goes unmentioned: what is left out is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ddpopt.explanation.tables import WIDTH, Column, paragraph, table
from ddpopt.judge.report.matrix import LETTERS, NOT_RUN, Grid, Overview, Reason, letter_of, mark_of, overview
from ddpopt.judge.report.trial import indented, trial_text
from ddpopt.judge.report.wording import count_of, environment, headline, level_name, script_outcome, sentence
from ddpopt.judge.verdict import Location, Status, Verdict

EXAMPLES = 3
"""Findings shown of one reason."""

NOTES = 10
"""Notes shown of all trials."""

BETWEEN = 2
"""Blanks between two columns."""


def verdict_text(verdict: Verdict) -> str:
    """The whole text: plain ASCII of ours, 80 columns wide unless a name is longer than that.

    Args:
        verdict: what to show.

    Returns:
        Lines joined by line ends, none after the last, which is the verdict.
    """
    blocks = _many(verdict) if len(verdict.trials) > 1 else (b for t in verdict.trials for b in trial_text(t))
    location = [location_text(verdict.location)] if verdict.location else []
    known = [paragraph(environment(verdict), "  ")] if verdict.environment else []
    return "\n\n".join([*known, *blocks, *location, paragraph(headline(verdict), "  ")])


def _many(verdict: Verdict) -> Iterator[str]:
    view = overview(verdict)
    yield _columns(view)
    for grid in view.grids:
        yield from _grid(grid, view)
    yield from _legend(view)
    for reason in view.reasons:
        yield _reason(reason)
    notes = Counter(note for trial in verdict.trials for note in trial.notes)
    if notes:
        yield _notes(notes)


def _columns(view: Overview) -> str:
    """Which letter is which column, and how its trials ended."""
    rows = []
    for index, name in enumerate(view.columns):
        ends = Counter(trial.status for trial in view.column(name))
        rows.append((letter_of(index), name, *(ends[status] or "-" for status in Status)))
    columns = [Column("", "right"), Column(view.across, fills=True)]
    return table([*columns, *(Column(status, "right") for status in Status)], rows)


def _grid(grid: Grid, view: Overview) -> Iterator[str]:
    """One grid, in as many tables as its columns need."""
    letters = [letter_of(index) for index in range(len(view.columns))]
    rows = {name: [mark_of(cell) for cell in cells] for name, cells in grid.rows}
    width = BETWEEN + max(len(mark) for marks in [letters, *rows.values()] for mark in marks)
    names = min(max(map(len, [view.down, *rows])), WIDTH // 2)
    tables = -(-len(letters) // max(1, (WIDTH - names) // width))
    size = -(-len(letters) // tables)
    for start in range(0, len(letters), size):
        part = slice(start, start + size)
        columns = [
            Column(view.down, fills=names == WIDTH // 2),
            *(Column(letter, "right") for letter in letters[part]),
        ]
        marks = table(columns, [(name, *row[part]) for name, row in rows.items()])
        yield f"{grid.title}\n{marks}"


def _legend(view: Overview) -> Iterator[str]:
    """What the marks mean, of those that are there."""
    seen = {reason.status for reason in view.reasons}
    parts = [f"{letter} {status}" for status, letter in LETTERS.items() if status in seen]
    if parts:
        parts = [f"{', '.join(parts)} (the number is that of the reason below)"]
    if any(cell is None for grid in view.grids for _, cells in grid.rows for cell in cells):
        parts.append(f"{NOT_RUN} did not run")
    if parts:
        yield paragraph("; ".join(parts), "  ")


def _reason(reason: Reason) -> str:
    trials = count_of(len(reason.trials), "trial")
    lines = [paragraph(f"{reason.mark}: {reason.status}, {trials}", "  ")]
    if reason.text:
        lines.append(indented(reason.text, "    "))
    lines += [
        indented(f"{level_name(level)} does not hold: {claim}.", "    ") for level, claim in reason.claims
    ]
    lines += _examples(reason)
    return "\n".join(lines)


def _examples(reason: Reason) -> Iterator[str]:
    """The first finding of each trial, then how many there are in all."""
    firsts = [(trial, trial.findings[0]) for trial in reason.trials if trial.findings][:EXAMPLES]
    for trial, finding in firsts:
        yield indented(f"{trial.name}: {sentence(finding)}", "      ", "    - ")
    left = len(reason.findings) - len(firsts)
    if left:
        yield f"    - and {count_of(left, 'finding')} more, all in the JSON"


def _notes(notes: Counter[str]) -> str:
    lines = ["notes"]
    for note, count in notes.most_common(NOTES):
        lines.append(indented(f"{note} ({count_of(count, 'trial')})", "    ", "  - "))
    if len(notes) > NOTES:
        lines.append(f"  - and {count_of(len(notes) - NOTES, 'note')} more, all in the JSON")
    return "\n".join(lines)


def location_text(location: Location) -> str:
    """Where it goes wrong: what was tried, the layer, the segments, the script.

    Args:
        location: what the search found.

    Returns:
        A block of lines.
    """
    rungs = [(rung.name, "agrees" if rung.agrees else "DIFFERS", rung.detail) for rung in location.rungs]
    lines = ["where it goes wrong"]
    lines.append(table([Column("tried"), Column("result"), Column("seen", fills=True)], rungs))
    lines.append(paragraph(f"The lowest layer that is wrong: {location.layer}.", "  "))
    if location.segments:
        lines.append("The smallest set of compiled segments that shows it:")
        lines += [indented(segment, "    ", "  - ") for segment in location.segments]
    if location.script:
        lines.append(paragraph(f"Script: {location.script} ({script_outcome(location)})", "  "))
    if location.note:
        lines.append(indented(location.note, "  ", ""))
    return "\n".join(lines)
