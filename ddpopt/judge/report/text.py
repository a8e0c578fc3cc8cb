"""A verdict as text for a terminal or a log.

One trial is shown in full; several as grids of marks, with the reasons that the marks refer to. Invariant:
the last line is the verdict, and nothing wrong goes unmentioned: omitted findings are counted.
"""

from collections.abc import Iterator, Sequence

from ddpopt.judge.report.matrix import Reason, matrix_text, overview
from ddpopt.judge.report.wording import count_of, headline, level_name, number, outcome, sentence, worst_first
from ddpopt.judge.verdict import Location, Measured, Trial, Verdict
from ddpopt.terminal.tables import Column, Noted, mib, names, numbers, paragraph, table

AT_MOST = 8
"""Number of findings shown for one reason, and of notes."""
LINES = 30
"""Number of lines shown for a reason, which may contain the stacks of all ranks."""
RESULT_OF_RUNG = {True: "agrees", False: "DIFFERS", None: "not judged"}


def verdict_text(verdict: Verdict) -> str:
    """The whole text; ddpopt's own words are ASCII, and lines have 80 columns unless a name is longer.

    Args:
        verdict: what to show.

    Returns:
        Lines joined by newlines, without one after the last, which is the verdict.
    """
    view = overview(verdict)
    several = len(verdict.trials) > 1
    known = "; ".join(f"{name} {value}" for name, value in verdict.environment.items())
    blocks = [paragraph(known, "  ")] if known else []
    blocks += matrix_text(view) if several else map(_title, verdict.trials)
    blocks += [_reason(reason, several=several) for reason in view.reasons]
    blocks += [] if several else [block for trial in verdict.trials for block in _tables(trial)]
    notes = list(dict.fromkeys(note for trial in verdict.trials for note in trial.remarks))
    blocks += ["\n".join(["notes", *_listed(notes, "note")])] if notes else []
    blocks += [_location(verdict.location)] if verdict.location else []
    return "\n\n".join([*blocks, paragraph(headline(verdict), "  ")])


def indented(text: str, indent: str, first: str | None = None) -> str:
    r"""Wrap a sentence under an indent; a text of several lines, such as a stack, keeps them.

    >>> print(indented("rank 1 died\n  at line 7", "    ", "  - "))
      - rank 1 died
          at line 7
    """
    start, *rest = text.splitlines() or [""]
    head = paragraph(f"{indent if first is None else first}{start}", indent)
    if len(rest) > LINES:
        rest = [*rest[:LINES], f"... {count_of(len(rest) - LINES, 'more line')}, all in the JSON"]
    return "\n".join([head, *(f"{indent}{line}".rstrip() for line in rest)])


def _listed(texts: Sequence[str], noun: str) -> list[str]:
    """The first few texts, and the number of the others."""
    lines = [indented(text, "    ", "  - ") for text in texts[:AT_MOST]]
    left = len(texts) - AT_MOST
    return [*lines, f"  - and {count_of(left, f'more {noun}')}, all in the JSON"] if left > 0 else lines


def _title(trial: Trial) -> str:
    details = [f"{trial.name}: {trial.status}"]
    if trial.levels:
        details.append(f"judged by {', '.join(level_name(level) for level in trial.levels)}")
    if trial.backend:
        details.append(f"{count_of(trial.graphs, 'graph')} compiled")
    return paragraph("; ".join([*details, f"{trial.seconds:.1f} s"]), "  ")


def _reason(reason: Reason, *, several: bool) -> str:
    """The common reason of some trials, and their first findings."""
    lines = [f"{reason.mark}: {reason.status}, {count_of(len(reason.trials), 'trial')}"] if several else []
    lines += [indented(reason.text, "  ")] if reason.text else []
    lines += [
        paragraph(f"{level_name(level)} does not hold: {claim}.", "  ") for level, claim in reason.claims
    ]
    findings = [(f"{trial.name}: " if several else "", finding) for trial, finding in reason.findings]
    told = [f"{where}{finding.level}: {sentence(finding)}" for where, finding in findings]
    return "\n".join([*lines, *_listed(told, "finding")])


def _tables(trial: Trial) -> Iterator[str]:
    """The worst comparison of each level, and the buckets."""
    if trial.measured:
        levels = dict.fromkeys(entry.level for entry in trial.measured)
        rows = [_level([each for each in trial.measured if each.level == level]) for level in levels]
        columns = [Column("level"), *numbers("parameters"), Column("the worst of them")]
        yield table([*columns, *numbers("ULPs", "error", "bound")], rows)
    if trial.buckets:
        worst = {entry.bucket: entry.share for entry in reversed(worst_first(trial.measured))}
        sent = [
            (b.index, mib(b.nbytes), b.dtype, number(worst.get(b.index)), names(b.params))
            for b in trial.buckets
        ]
        columns = [*numbers("bucket", "MiB"), Column("dtype"), *numbers("error/bound")]
        yield table([*columns, Column("gradients")], sent)


def _level(entries: Sequence[Measured]) -> tuple[object, ...]:
    worst = worst_first(entries)[0]
    where: object = Noted(worst.parameter, f"rank {worst.rank}, {worst.moment or f'step {worst.step}'}")
    if all(entry.ulps == 0 and entry.error == 0 for entry in entries):
        where = "all equal, bit for bit"
    return worst.level, len(entries), where, number(worst.ulps), number(worst.error), number(worst.bound)


def _location(location: Location) -> str:
    """The stages that were tried, the layer, the segments and the script."""
    rungs = [(rung.name, RESULT_OF_RUNG[rung.agrees], rung.detail) for rung in location.rungs]
    lines = ["where it goes wrong"]
    lines.append(table([Column("tried"), Column("result"), Column("seen")], rungs))
    lines.append(paragraph(f"The lowest layer that is wrong: {location.layer}.", "  "))
    if location.segments:
        lines.append("The smallest set of compiled segments that shows it:")
        lines += [indented(segment, "    ", "  - ") for segment in location.segments]
    if location.script:
        lines.append(paragraph(f"Script: {location.script} ({outcome(location)})", "  "))
    if location.note:
        lines.append(indented(location.note, "  ", ""))
    return "\n".join(lines)
