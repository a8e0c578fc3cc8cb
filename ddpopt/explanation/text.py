"""The text of an explanation: a summary first, then each split in the order in which buckets are reduced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from ddpopt.explanation.tables import MIB, Column, Noted, mib, names, paragraph, table
from ddpopt.planning.plan import Cut, Plan

if TYPE_CHECKING:
    from ddpopt.explanation.result import Explanation, OwnBucket, TorchSplit
    from ddpopt.planning.bucket_rule import BucketConfig

TORCH = "torch's DDPOptimizer"
ROWS = {
    "segments": "segments",
    "buckets": "buckets that DDP reduces",
    "spread": "  that wait on more than one segment",
    "early": "  that leave before backward ends",
    "unseen": "parameters that it does not see",
    "recounted": "parameters that it counts more than once",
}


def render(explanation: Explanation) -> str:
    """The whole text, at most 80 columns wide, without control codes.

    Args:
        explanation: what to show.

    Returns:
        Lines joined by line ends, none after the last.
    """
    return "\n\n".join(
        [
            _title(explanation),
            _summary(explanation),
            *_plan(explanation.plan, inline=explanation.inline),
            *_ddp(explanation),
            *_torch(explanation.torch),
        ]
    )


def _title(explanation: Explanation) -> str:
    buckets = explanation.plan.buckets
    count = sum(len(bucket.params) for bucket in buckets)
    size = mib(sum(bucket.nbytes for bucket in buckets))
    return paragraph(
        f"{explanation.model}: {count} parameters, {size} MiB; {_limits(explanation.config)}", "  "
    )


def _limits(config: BucketConfig) -> str:
    """The limits in words: DDP's modes too, for they decide whether it rebuilds."""
    limits = config.rebuilt_limits
    if len(set(limits)) == 1:
        limits = limits[:1]
    sizes = ", then ".join(f"{limit / MIB:.4g}" for limit in limits)
    modes = [name for name in ("find_unused_parameters", "static_graph") if getattr(config, name)]
    return "; ".join([f"buckets close at {sizes} MiB", *modes])


def _summary(explanation: Explanation) -> str:
    ours, theirs = explanation.plan_tally, explanation.torch_tally
    rows = [
        (ROWS[field.name], _count(getattr(ours, field.name)), _count(getattr(theirs, field.name)))
        for field in fields(ours)
    ]
    lines = table([Column(""), Column("ddpopt", "right"), Column(TORCH, "right")], rows)
    failure = explanation.torch.failure
    return f"{lines}\n{paragraph(f'{TORCH} crashes: {failure}', '  ')}" if failure else lines


def _count(number: int | None) -> str:
    return "-" if number is None else str(number)


def _plan(plan: Plan, *, inline: bool) -> Iterator[str]:
    buckets = [
        (b.index, b.segment, mib(b.nbytes), b.dtype, Noted(names(b.params), b.reason)) for b in plan.buckets
    ]
    yield f"ddpopt's plan, in the order of reduction; fingerprint {plan.fingerprint}\n" + table(
        [
            Column("bucket", "right"),
            Column("segment", "right"),
            Column("MiB", "right"),
            Column("dtype"),
            Column("gradients, and why the bucket ends there", fills=True),
        ],
        buckets,
    )
    if inline:
        yield paragraph("No graph is cut: each bucket leaves from inside the backward.", "  ")
    else:
        yield "ddpopt's segments, in the order of backward\n" + _segments(plan)
    if plan.unread:
        yield paragraph(f"No compiled graph reads {names(plan.unread)}.", "  ")


def _segments(plan: Plan) -> str:
    rows = []
    cuts = {(cut.graph, cut.before): cut for cut in plan.cuts}
    for segment in reversed(plan.segments):
        cut = cuts.get((segment.graph, segment.nodes[0])) if segment.nodes else None
        first = segment.nodes[0] if segment.nodes else "-"
        buckets = ", ".join(map(str, segment.buckets)) or "-"
        rows.append((segment.index, segment.graph, first, len(segment.nodes), buckets, _why(cut, plan)))
    columns = [
        Column("segment", "right"),
        Column("graph", "right"),
        Column("from node"),
        Column("nodes", "right"),
        Column("completes"),
        Column("why it is cut there", fills=True),
    ]
    return table(columns, rows)


def _why(cut: Cut | None, plan: Plan) -> str:
    """A cut's reason without what the table of buckets already says."""
    if cut is None:
        return "the graph starts here"
    for bucket in plan.buckets:
        cut_reason = cut.reason.removesuffix(f": {bucket.reason}")
        if cut_reason == f"bucket {bucket.index} is complete":
            return cut_reason
    return cut.reason


def _ddp(explanation: Explanation) -> Iterator[str]:
    ddp = explanation.ddp
    when = "rebuilt in ready order" if ddp.rebuilt else "which it never rebuilds"
    yield f"DDP's own buckets in eager training, {when}\n" + _own_buckets(ddp.buckets, waits=False)
    if ddp.note:
        yield paragraph(ddp.note, "  ")


def _own_buckets(buckets: tuple[OwnBucket, ...], *, waits: bool) -> str:
    columns = [
        Column("bucket", "right"),
        Column("MiB", "right"),
        Column("dtype"),
        Column("gradients", fills=True),
    ]
    rows: list[tuple[object, ...]] = [(b.index, mib(b.nbytes), b.dtype, names(b.params)) for b in buckets]
    if waits:
        columns.insert(1, Column("waits on"))
        rows = [
            (index, names([str(s) for s in reversed(bucket.segments)]), *rest)
            for (index, *rest), bucket in zip(rows, buckets, strict=True)
        ]
    return table(columns, rows)


def _torch(split: TorchSplit) -> Iterator[str]:
    if split.failure:
        return
    if split.segments:
        yield f"{TORCH}: its segments, in the order of backward\n" + _torch_segments(split)
        yield f"{TORCH}: DDP's own buckets under it\n" + _own_buckets(split.buckets, waits=True)
    for label, params in (
        ("Parameters that it does not see", split.unseen),
        ("Parameters that it counts more than once", split.recounted),
        ("Parameters that it counts although DDP does not reduce them", split.alien),
    ):
        if params and split.segments:
            yield paragraph(f"{label}: {names(params)}.", "  ")
    for note in split.notes:
        yield paragraph(f"{TORCH}: {note}", "  ")


def _torch_segments(split: TorchSplit) -> str:
    columns = [
        Column("segment", "right"),
        Column("graph", "right"),
        Column("MiB counted", "right"),
        Column("parameters counted", fills=True),
    ]
    rows = [
        (s.index, s.graph, mib(s.counted_bytes), "as before: the same code" if s.reused else names(s.counted))
        for s in reversed(split.segments)
    ]
    return table(columns, rows)
