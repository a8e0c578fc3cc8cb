"""The text of a diagnosis: what to do first, then the evidence, topic by topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpopt.explanation.tables import Column, Noted, mib, names, paragraph, table

if TYPE_CHECKING:
    from ddpopt.doctor.diagnosis import Alignment, Break, CompileTime, Diagnosis, Finding

SLOWEST = 8
"""How many compiled pieces are listed for each mode."""


def render(diagnosis: Diagnosis) -> str:
    """The whole text, at most 80 columns wide, without control codes.

    Args:
        diagnosis: what to show.

    Returns:
        Lines joined by line ends, none after the last.
    """
    return "\n\n".join(
        [
            _title(diagnosis),
            *_to_do(diagnosis.problems),
            *_breaks(diagnosis),
            *_recompiles(diagnosis),
            *_times(diagnosis.compile_times),
            *_alignments(diagnosis),
            _parameters(diagnosis),
            *_notes([finding for finding in diagnosis.findings if finding not in diagnosis.problems]),
        ]
    )


def _title(diagnosis: Diagnosis) -> str:
    ranks = "one rank" if diagnosis.world_size == 1 else f"{diagnosis.world_size} ranks"
    return paragraph(
        f"{diagnosis.model}: {diagnosis.steps} steps in each mode on {ranks}, backend {diagnosis.backend}, "
        f"torch {diagnosis.torch_version}",
        "  ",
    )


def _to_do(problems: Sequence[Finding]) -> Iterator[str]:
    if not problems:
        yield "Nothing to do: nothing was found that costs overlap or compile time."
        return
    yield f"What to do, most important first ({len(problems)})"
    for number, finding in enumerate(problems, 1):
        label = f"{number}. {finding.weight.value}, {finding.topic}: "
        yield f"{paragraph(label + finding.what, '   ')}\n{_next(finding)}"


def _next(finding: Finding) -> str:
    return paragraph(f"   Next: {finding.step}", "   ")


def _notes(notes: Sequence[Finding]) -> Iterator[str]:
    if notes:
        yield "Worth knowing"
    for finding in notes:
        yield f"{paragraph(f'- {finding.what}', '  ')}\n{paragraph(f'  {finding.step}', '  ')}"


def _breaks(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.compile_times:
        return
    if not diagnosis.breaks:
        yield "Graph breaks in the model: none."
        return
    rows = [
        (_place(found.file, found.line), found.times, Noted(found.reason, _detail(found)))
        for found in diagnosis.breaks
    ]
    columns = [Column("at"), Column("times", "right"), Column("reason, and the line", fills=True)]
    yield "Graph breaks in the model\n" + table(columns, rows)


def _detail(found: Break) -> str:
    return f"{found.code} [{found.abandons}() runs in eager]" if found.abandons else found.code


def _recompiles(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.compile_times:
        return
    if not diagnosis.recompiles:
        yield "Recompiles of the model: none."
        return
    rows = [
        (
            again.compile_id,
            _place(again.file, again.line),
            again.step,
            f"{again.seconds:.1f}",
            Noted(again.guard, again.read_by or again.function.rstrip(",")),
        )
        for again in diagnosis.recompiles
    ]
    columns = [
        Column("compiled as"),
        Column("at"),
        Column("step", "right"),
        Column("seconds", "right"),
        Column("guard that failed, and the line or function", fills=True),
    ]
    yield "Recompiles of the model\n" + table(columns, rows)


def _place(file: str, line: int) -> str:
    """A place by its last two names: whole paths leave no room for anything else; JSON has them."""
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"


def _times(times: Sequence[CompileTime]) -> Iterator[str]:
    if not times:
        return
    phases = dict.fromkeys(name for time in times for name, _ in time.phases)
    by_mode = [dict(time.phases) for time in times]
    rows = [(name, *(f"{seconds.get(name, 0.0):.2f}" for seconds in by_mode)) for name in phases]
    rows.append(("in all", *(f"{time.total_s:.2f}" for time in times)))
    rows.append(("graphs", *(str(time.graphs) for time in times)))
    rows.append(("compiled pieces", *(str(len(time.segments)) for time in times)))
    columns = [Column("phase"), *(Column(_title_of(time), "right") for time in times)]
    yield "Compile time in seconds, from empty caches\n" + table(columns, rows)
    for time in times:
        yield from _pieces(time)


def _title_of(time: CompileTime) -> str:
    return f"{time.mode} (fails)" if time.failed else time.mode


def _pieces(time: CompileTime) -> Iterator[str]:
    if len(time.segments) < 2:
        return
    slowest = sorted(time.segments, key=lambda piece: -(piece.forward_s + (piece.backward_s or 0.0)))
    rows = [
        (
            piece.index,
            f"{piece.forward_s:.2f}",
            "-" if piece.backward_s is None else f"{piece.backward_s:.2f}",
            names(piece.params),
        )
        for piece in sorted(slowest[:SLOWEST], key=lambda piece: piece.index)
    ]
    columns = [
        Column("piece", "right"),
        Column("compiled in", "right"),
        Column("backward later", "right"),
        Column("parameters that it completes", fills=True),
    ]
    which = f"its {SLOWEST} slowest pieces" if len(slowest) > SLOWEST else "its pieces"
    yield f"{time.mode}: {which}, in forward order\n" + table(columns, rows)


def _alignments(diagnosis: Diagnosis) -> Iterator[str]:
    for alignment in diagnosis.alignments:
        yield _heading(alignment) + "\n" + _buckets(alignment)


def _heading(alignment: Alignment) -> str:
    count = len(alignment.buckets)
    buckets = f"{alignment.mode}: {_plural(count, 'bucket')} in the running reducer"
    if alignment.inline and count > 1:
        text = f"{buckets}; each leaves from inside the backward, when its own last gradient is there"
    elif alignment.segments is None:
        text = buckets
    elif alignment.segments == 1 or count == 1:
        text = f"{buckets}, {_plural(alignment.segments, 'segment')}"
    else:
        text = (
            f"{buckets}, {alignment.segments} segments; {alignment.early} can leave before the last "
            f"segment's backward, {alignment.spread} wait for more than one"
        )
    return paragraph(text, "  ")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _buckets(alignment: Alignment) -> str:
    waits = any(bucket.segments for bucket in alignment.buckets)
    columns = [Column("bucket", "right"), Column("MiB", "right"), Column("gradients", fills=True)]
    if waits:
        columns.insert(1, Column("waits on"))
    rows = []
    for bucket in alignment.buckets:
        segments = [names([str(index) for index in reversed(bucket.segments)])] if waits else []
        rows.append((bucket.index, *segments, mib(bucket.nbytes), names(bucket.params)))
    return table(columns, rows)


def _parameters(diagnosis: Diagnosis) -> str:
    tried = f"{diagnosis.steps} steps with the inputs of {diagnosis.ranks} ranks"
    if not diagnosis.unused:
        lines = [f"Every trainable parameter got a gradient in each of {tried}."]
    else:
        lines = [f"Parameters without a gradient, in {tried}:"]
    parts = [paragraph(lines[0], "  ")]
    if diagnosis.unused:
        rows = [(unused.name, "all" if unused.always else len(unused.missing)) for unused in diagnosis.unused]
        parts.append(table([Column("parameter", fills=True), Column("backwards without it", "right")], rows))
    if diagnosis.overcounted:
        parts.append("\nCounted by torch's optimizer at more than DDP reduces:")
        counts = [
            (over.name, mib(over.nbytes), over.times, mib(over.storage_bytes))
            for over in diagnosis.overcounted
        ]
        columns = [
            Column("parameter", fills=True),
            Column("MiB", "right"),
            Column("times counted", "right"),
            Column("MiB counted each time", "right"),
        ]
        parts.append(table(columns, counts))
    return "\n".join(parts)
