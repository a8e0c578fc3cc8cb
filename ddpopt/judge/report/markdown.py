"""A verdict as GitHub's Markdown: tables of marks that fold away, and what is wrong in full.

Invariant: names and messages are shown as they are; none can end a table cell, a tag or a heading.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Sequence

from ddpopt.explanation.tables import mib, names
from ddpopt.judge.report.matrix import Grid, Overview, Reason, letter_of, mark_of, overview
from ddpopt.judge.report.wording import (
    WORDS,
    count_of,
    environment,
    level_name,
    number,
    script_outcome,
    sentence,
    share,
    summary,
    tally,
    worst_first,
)
from ddpopt.judge.verdict import Location, Status, Trial, Verdict

AT_MOST = 20
"""Findings of one reason, and parameters, that are shown: GitHub takes 1 MiB from a step."""

SIGNS = {0: ":white_check_mark:", 1: ":x:", 3: ":warning:"}
PUNCTUATION = re.compile(r"([\\`*_\[\]#|~])")


def step_summary(verdict: Verdict) -> str:
    """Write a verdict as GitHub's Markdown.

    Args:
        verdict: what to show.

    Returns:
        Blocks with an empty line after each: GitHub joins the summaries of several commands.
    """
    return "".join(f"{block}\n\n" for block in _blocks(verdict))


def _blocks(verdict: Verdict) -> Iterator[str]:
    view = overview(verdict)
    yield f"## {SIGNS[verdict.exit_code]} {WORDS[verdict.exit_code]}: {plain(verdict.target)}"
    yield f"On {plain(summary(verdict))}."
    if verdict.environment:
        yield plain(environment(verdict))
    for reason in view.reasons:
        if reason.status is not Status.NOT_POSSIBLE:
            yield from _reason(reason)
    if verdict.location:
        yield from _location(verdict.location)
    yield from _impossible([reason for reason in view.reasons if reason.status is Status.NOT_POSSIBLE])
    if len(verdict.trials) == 1:
        yield from _trial(verdict.trials[0])
    elif verdict.trials:
        yield from _matrix(view)


def plain(text: str) -> str:
    """Text that means nothing to Markdown, in one line."""
    return PUNCTUATION.sub(r"\\\1", html.escape(" ".join(text.split()), quote=False))


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A table; its first columns hold words, the others figures or marks."""
    ruler = ["---"] * words + ["---:"] * (len(header) - words)
    titles, *cells = [[plain(str(cell)) for cell in line] for line in [header, *rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [titles, ruler, *cells])


def _folded(title: str, body: str, *, is_open: bool) -> str:
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{html.escape(title)}</summary>\n\n{body}\n\n</details>"


def _reason(reason: Reason) -> Iterator[str]:
    yield f"### {reason.mark}: {reason.status}, {count_of(len(reason.trials), 'trial')}"
    if reason.text:
        yield f"<pre>{html.escape(reason.text, quote=False)}</pre>"
    findings = reason.findings
    for level, claim in reason.claims:
        found = [(trial, each) for trial, each in findings if (each.level, each.claim) == (level, claim)]
        lines = [f"**{plain(level_name(level))}** does not hold: {plain(claim)}.", ""]
        lines += [f"- {plain(f'{trial.name}: {sentence(each)}')}" for trial, each in found[:AT_MOST]]
        if len(found) > AT_MOST:
            lines.append(f"- and {count_of(len(found) - AT_MOST, 'finding')} more, all in the JSON")
        yield "\n".join(lines)


def _impossible(reasons: Sequence[Reason]) -> Iterator[str]:
    lines = [
        f"- **{each.mark}**, {count_of(len(each.trials), 'trial')}: {plain(each.text)}" for each in reasons
    ]
    if lines:
        yield _folded("What is not possible here, and why", "\n".join(lines), is_open=len(lines) == 1)


def _location(location: Location) -> Iterator[str]:
    yield "### Where it goes wrong"
    rungs = [(rung.name, "agrees" if rung.agrees else "differs", rung.detail) for rung in location.rungs]
    yield markdown_table(["tried", "result", "seen"], rungs, words=3)
    yield f"The lowest layer that is wrong: **{plain(location.layer)}**."
    if location.segments:
        lines = [f"- {plain(segment)}" for segment in location.segments]
        yield "\n".join(["The smallest set of compiled segments that shows it:", "", *lines])
    if location.script:
        yield f"Script: {plain(location.script)} ({script_outcome(location)})."
    if location.note:
        yield plain(location.note)


def _trial(trial: Trial) -> Iterator[str]:
    worst = worst_first(trial.measured)
    if worst:
        rows = [
            (m.parameter, m.level, *map(number, (m.bucket, m.ulps, m.error, m.bound, share(m))))
            for m in worst[:AT_MOST]
        ]
        header = ["parameter", "level", "bucket", "ULPs", "error", "bound", "error/bound"]
        more = f"\n\nThe worst {AT_MOST} of {len(worst)}." if len(worst) > AT_MOST else ""
        yield _folded("Errors, the worst first", f"{markdown_table(header, rows)}{more}", is_open=False)
    if trial.buckets:
        buckets = [(names(b.params), b.dtype, b.index, mib(b.nbytes)) for b in trial.buckets]
        table = markdown_table(["gradients", "dtype", "bucket", "MiB"], buckets, words=2)
        yield _folded("Buckets, in the order of reduction", table, is_open=False)
    if trial.notes:
        yield "\n".join(f"- {plain(note)}" for note in trial.notes)


def _matrix(view: Overview) -> Iterator[str]:
    columns = []
    for index, name in enumerate(view.columns):
        trials = view.column(name)
        ends = [sum(trial.status is status for trial in trials) for status in Status]
        columns.append((name, letter_of(index), *(end or "-" for end in ends)))
    yield markdown_table([view.across, "", *Status], columns)
    for grid in view.grids:
        yield _grid(grid, view)


def _grid(grid: Grid, view: Overview) -> str:
    letters = [letter_of(index) for index in range(len(view.columns))]
    table = markdown_table([view.down, *letters], [(name, *map(mark_of, cells)) for name, cells in grid.rows])
    trials = [cell.trial for _, cells in grid.rows for cell in cells if cell]
    return _folded(f"{grid.title}: {tally(trials)}", table, is_open=len(view.grids) == 1)
