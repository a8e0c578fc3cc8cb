"""One trial as text, in full: how it ended, its findings, the worst of each level, its buckets, its notes.

Invariant: findings are told claim by claim, in sentences; those left out are counted.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from ddpopt.explanation.tables import WIDTH, Column, Noted, mib, names, paragraph, table
from ddpopt.judge.report.wording import count_of, level_name, number, sentence, share, worst_first
from ddpopt.judge.verdict import Finding, Measured, Trial

AT_MOST = 8
"""Findings shown of one claim."""


def trial_text(trial: Trial) -> Iterator[str]:
    """Show a trial.

    Args:
        trial: what to show.

    Yields:
        Blocks of lines, to be set apart by an empty line.
    """
    yield _title(trial)
    if trial.reason:
        yield indented(trial.reason, "  ")
    yield from claims_text(trial.findings)
    if trial.measured:
        yield _levels(trial)
    if trial.buckets:
        yield _buckets(trial)
    if trial.notes:
        yield notes_text(trial.notes)


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
    return "\n".join([head, *(f"{indent}{line}".rstrip() for line in rest)])


def claims_text(findings: Iterable[Finding]) -> Iterator[str]:
    """Each claim that does not hold, with what was found.

    Args:
        findings: in the order in which they were made.

    Yields:
        One block for each claim.
    """
    claims: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        claims.setdefault((finding.level, finding.claim), []).append(finding)
    for (level, claim), found in claims.items():
        lines = [paragraph(f"{level_name(level)} does not hold: {claim}.", "  ")]
        lines += [indented(sentence(finding), "    ", "  - ") for finding in found[:AT_MOST]]
        if len(found) > AT_MOST:
            lines.append(f"  - and {count_of(len(found) - AT_MOST, 'finding')} more, all in the JSON")
        yield "\n".join(lines)


def notes_text(notes: Iterable[str]) -> str:
    """What a reader should know though nothing is wrong."""
    return "\n".join(["notes", *(indented(note, "    ", "  - ") for note in notes)])


def _title(trial: Trial) -> str:
    details = []
    if trial.levels:
        details.append(f"judged by {', '.join(level_name(level) for level in trial.levels)}")
    if trial.backend:
        details.append(f"{count_of(trial.graphs, 'graph')} compiled")
    if trial.seconds:
        details.append(f"{trial.seconds:.1f} s")
    lines = [f"{trial.name}: {trial.status}", "; ".join(details)]
    return "\n".join(paragraph(line, "  ") for line in lines if line)


def _levels(trial: Trial) -> str:
    by_level: dict[str, list[Measured]] = {}
    for entry in trial.measured:
        by_level.setdefault(entry.level, []).append(entry)
    rows = []
    for level, entries in by_level.items():
        worst = worst_first(entries)[0]
        equal = all(entry.ulps == 0 and entry.error == 0 for entry in entries)
        name = "all equal, bit for bit" if equal else worst.parameter
        where = f"rank {worst.rank}, step {worst.step}"
        rows.append(
            (
                level,
                len(entries),
                name if equal else Noted(name, where),
                number(worst.ulps),
                number(worst.error),
                number(worst.bound),
            )
        )
    columns = [
        Column("level"),
        Column("parameters", "right"),
        Column("the worst of them", fills=True),
        Column("ULPs", "right"),
        Column("error", "right"),
        Column("bound", "right"),
    ]
    return table(columns, rows)


def _buckets(trial: Trial) -> str:
    worst: dict[int | None, Measured] = {}
    for entry in reversed(worst_first(trial.measured)):
        worst[entry.bucket] = entry
    rows = []
    for bucket in trial.buckets:
        used = number(share(worst[bucket.index])) if bucket.index in worst else "-"
        rows.append((bucket.index, mib(bucket.nbytes), bucket.dtype, used, names(bucket.params)))
    columns = [
        Column("bucket", "right"),
        Column("MiB", "right"),
        Column("dtype"),
        Column("error/bound", "right"),
        Column("gradients", fills=True),
    ]
    return table(columns, rows)
