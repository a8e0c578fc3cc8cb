"""A verdict as text for a terminal or a log.

One trial is shown in full; several as grids of marks, with the reasons that the marks point to. Invariant:
the last line is the verdict, and nothing that is wrong goes unmentioned: what is left out is counted.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

from ddpopt.explanation.tables import WIDTH, Column, Noted, mib, names, paragraph, table
from ddpopt.judge.report.matrix import Reason, matrix_text, overview
from ddpopt.judge.report.wording import (
    count_of,
    environment,
    headline,
    level_name,
    number,
    script_outcome,
    sentence,
    share,
    worst_first,
)
from ddpopt.judge.verdict import Finding, Location, Measured, Trial, Verdict

AT_MOST = 8
"""Findings shown of one claim of one trial."""
EXAMPLES = 3
"""Findings shown of a reason that several trials share."""
NOTES = 10
"""Notes shown of several trials."""
LINES = 30
"""Lines shown of a reason, which may hold the stacks of all ranks."""
IN_JSON = "more, all in the JSON"


def verdict_text(verdict: Verdict) -> str:
    """The whole text: plain ASCII of ours, 80 columns wide unless a name is longer than that.

    Args:
        verdict: what to show.

    Returns:
        Lines joined by line ends, none after the last, which is the verdict.
    """
    blocks = _many(verdict) if len(verdict.trials) > 1 else (b for t in verdict.trials for b in _trial(t))
    location = [_location(verdict.location)] if verdict.location else []
    known = [paragraph(environment(verdict), "  ")] if verdict.environment else []
    return "\n\n".join([*known, *blocks, *location, paragraph(headline(verdict), "  ")])


def indented(text: str, indent: str, first: str | None = None) -> str:
    r"""Wrap a sentence under an indent; a text of several lines, such as a stack, keeps them.

    >>> print(indented("rank 1 died\n  at line 7", "    ", "  - "))
      - rank 1 died
          at line 7
    """
    start, *rest = text.splitlines() or [""]
    head = textwrap.fill(
        start,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if len(rest) > LINES:
        rest = [*rest[:LINES], f"... {count_of(len(rest) - LINES, 'line')} {IN_JSON}"]
    return "\n".join([head, *(f"{indent}{line}".rstrip() for line in rest)])


# ------------------------------------------------------------------------------------------------- one trial


def _trial(trial: Trial) -> Iterator[str]:
    details = []
    if trial.levels:
        details.append(f"judged by {', '.join(level_name(level) for level in trial.levels)}")
    if trial.backend:
        details.append(f"{count_of(trial.graphs, 'graph')} compiled")
    if trial.seconds:
        details.append(f"{trial.seconds:.1f} s")
    title = [f"{trial.name}: {trial.status}", "; ".join(details)]
    yield "\n".join(paragraph(line, "  ") for line in title if line)
    if trial.reason:
        yield indented(trial.reason, "  ")
    yield from _claims(trial.findings)
    if trial.measured:
        yield _levels(trial.measured)
    if trial.buckets:
        yield _buckets(trial)
    if trial.notes:
        yield "\n".join(["notes", *(indented(note, "    ", "  - ") for note in trial.notes)])


def _claims(findings: Iterable[Finding]) -> Iterator[str]:
    """Each claim that does not hold, with what was found."""
    claims: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        claims.setdefault((finding.level, finding.claim), []).append(finding)
    for (level, claim), found in claims.items():
        lines = [paragraph(f"{level_name(level)} does not hold: {claim}.", "  ")]
        lines += [indented(sentence(finding), "    ", "  - ") for finding in found[:AT_MOST]]
        if len(found) > AT_MOST:
            lines.append(f"  - and {count_of(len(found) - AT_MOST, 'finding')} {IN_JSON}")
        yield "\n".join(lines)


def _levels(measured: Iterable[Measured]) -> str:
    by_level: dict[str, list[Measured]] = {}
    for entry in measured:
        by_level.setdefault(entry.level, []).append(entry)
    rows = []
    for level, entries in by_level.items():
        worst = worst_first(entries)[0]
        name: object = Noted(worst.parameter, f"rank {worst.rank}, step {worst.step}")
        if all(entry.ulps == 0 and entry.error == 0 for entry in entries):
            name = "all equal, bit for bit"
        rows.append((level, len(entries), name, *map(number, (worst.ulps, worst.error, worst.bound))))
    columns = [Column("level"), Column("parameters", "right"), Column("the worst of them", fills=True)]
    return table([*columns, *(Column(title, "right") for title in ("ULPs", "error", "bound"))], rows)


def _buckets(trial: Trial) -> str:
    worst = {entry.bucket: share(entry) for entry in reversed(worst_first(trial.measured))}
    rows = [
        (b.index, mib(b.nbytes), b.dtype, number(worst.get(b.index)), names(b.params)) for b in trial.buckets
    ]
    columns = [Column("bucket", "right"), Column("MiB", "right"), Column("dtype")]
    return table([*columns, Column("error/bound", "right"), Column("gradients", fills=True)], rows)


# --------------------------------------------------------------------------------------------- several trials


def _many(verdict: Verdict) -> Iterator[str]:
    view = overview(verdict)
    yield from matrix_text(view)
    yield from map(_reason, view.reasons)
    notes = Counter(note for trial in verdict.trials for note in trial.notes)
    if notes:
        lines = [
            indented(f"{note} ({count_of(count, 'trial')})", "    ", "  - ")
            for note, count in notes.most_common(NOTES)
        ]
        if len(notes) > NOTES:
            lines.append(f"  - and {count_of(len(notes) - NOTES, 'note')} {IN_JSON}")
        yield "\n".join(["notes", *lines])


def _reason(reason: Reason) -> str:
    """What some trials have in common, and the first finding of a few of them."""
    lines = [f"{reason.mark}: {reason.status}, {count_of(len(reason.trials), 'trial')}"]
    if reason.text:
        lines.append(indented(reason.text, "    "))
    lines += [
        indented(f"{level_name(level)} does not hold: {claim}.", "    ") for level, claim in reason.claims
    ]
    firsts = [(trial, trial.findings[0]) for trial in reason.trials if trial.findings][:EXAMPLES]
    lines += [indented(f"{trial.name}: {sentence(finding)}", "      ", "    - ") for trial, finding in firsts]
    left = len(reason.findings) - len(firsts)
    if left:
        lines.append(f"    - and {count_of(left, 'finding')} {IN_JSON}")
    return "\n".join(lines)


def _location(location: Location) -> str:
    """What was tried, the layer, the segments, the script."""
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
