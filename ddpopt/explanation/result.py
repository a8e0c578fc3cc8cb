"""The result of `ddpopt.explain`, as data and as text: ddpopt, DDP alone, and torch's DDPOptimizer.

Invariant: frozen; equal models and options give equal explanations, and equal text in every terminal.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ddpopt.errors import UsageError
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan, SentTogether
from ddpopt.planning.stored import read
from ddpopt.terminal.tables import MIB, Column, Noted, mib, names, numbers, paragraph, table
from ddpopt.tuning.pictures import text
from ddpopt.tuning.records import Link, Profile
from ddpopt.tuning.simulate import Timeline, simulate

FORMAT = 1
TORCH = "torch's DDPOptimizer"
ROWS = {
    "segments": "segments",
    "buckets": "buckets that DDP reduces",
    "spread": "  that wait on more than one segment",
    "early": "  that leave before backward ends",
    "unseen": "parameters that it does not see",
    "recounted": "parameters that it counts more than once",
}


@dataclass(frozen=True)
class OwnBucket(SentTogether):
    """A bucket that DDP's reducer fills by itself.

    Attributes:
        segments: indices of torch's segments that it waits on, ascending; empty if nothing is compiled.
    """

    segments: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnBuckets:
    """DDP's own buckets for eager training, in reduction order.

    Attributes:
        buckets: those after the rebuild if DDP rebuilds them, else those of every iteration.
        rebuilt: whether DDP rebuilds them in ready order.
        note: a limit of this prediction, if there is one.
    """

    buckets: tuple[OwnBucket, ...]
    rebuilt: bool
    note: str = ""


@dataclass(frozen=True)
class TorchSegment:
    """One run of a piece of the forward as torch's optimizer cuts it.

    Attributes:
        index: position in forward order.
        graph: index of the compiled graph that it is cut from.
        counted: parameters as the optimizer counted them, repeated if it counted them more than once.
        counted_bytes: their size, as the optimizer counted it.
        params: parameters whose gradients are complete once this segment's backward has run.
        reused: whether it runs the code of an earlier segment; `counted` is then that segment's.
    """

    index: int
    graph: int
    counted: tuple[str, ...]
    counted_bytes: int
    params: tuple[str, ...] = ()
    reused: bool = False


@dataclass(frozen=True)
class TorchSplit:
    """What torch's DDPOptimizer does with the same model.

    Attributes:
        segments: in forward order; empty if it fails or compiles nothing.
        buckets: DDP's own buckets, which follow the ready order of this split; empty if not known.
        unseen: parameters that DDP reduces and the optimizer does not count.
        recounted: parameters that it counts more than once.
        alien: parameters that it counts although DDP does not reduce them.
        failure: the error that it raised, if any; then no step runs.
        notes: other remarks on this prediction.
    """

    segments: tuple[TorchSegment, ...] = ()
    buckets: tuple[OwnBucket, ...] = ()
    unseen: tuple[str, ...] = ()
    recounted: tuple[str, ...] = ()
    alien: tuple[str, ...] = ()
    failure: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tally:
    """One split in numbers; None if there is nothing to count.

    Attributes:
        segments: number of segments that run in a forward.
        buckets: number of buckets that DDP reduces.
        spread: number of buckets that wait on more than one segment.
        early: number of buckets sent before backward ends; nothing overlaps with the others.
        unseen: number of parameters that DDP reduces and the split does not count.
        recounted: number of parameters counted more than once.
    """

    segments: int | None = None
    buckets: int | None = None
    spread: int | None = None
    early: int | None = None
    unseen: int | None = None
    recounted: int | None = None


@dataclass(frozen=True)
class Explanation:
    """One model under ddpopt, under DDP alone, and under torch's DDPOptimizer.

    ``str()`` is the table that ``ddpopt explain`` prints: plain text, at most 80 columns.

    Attributes:
        model: name of the model's class.
        config: DDP's bucket limits and modes.
        plan: ddpopt's plan.
        inline: whether the plan's graphs stay whole, and gradients leave from inside their backward.
        ddp: DDP's own buckets in eager training.
        torch: torch's DDPOptimizer.
        timelines: with a profile, the predicted step of this plan, ``"explained"``, and of the plan in the
            profile's file, ``"tuned"``, if it has one.
    """

    model: str
    config: BucketConfig
    plan: Plan
    inline: bool
    ddp: OwnBuckets
    torch: TorchSplit
    timelines: Mapping[str, Timeline] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [_title(self), _summary(self), *_plan(self.plan, inline=self.inline), *_ddp(self.ddp)]
        steps = [text(self.timelines)] if self.timelines else []
        return "\n\n".join([*parts, *_torch(self.torch), *steps])

    def predicted(self, profile: str | None, link: str | None = None) -> "Explanation":
        """Add the steps that are predicted from files.

        Args:
            profile: a file with a profile; required.
            link: a file with a link; by default the profile's.

        Raises:
            UsageError: a file cannot be read, or is of another kind or model.
        """
        if profile is None:
            raise UsageError(
                "--link: expected --profile FILE with it, which 'ddpopt tune --json FILE' writes"
            )
        found = Profile.from_file("--profile", profile)
        how = "eager" if found.strategy == "eager" else "compiled"
        found.require_fit(f"--profile {profile}", strategy=(how, "compiled"))
        cost = Link.from_file(*(("--profile", profile) if link is None else ("--link", link)))
        plans = {"explained": self.plan}
        if '"ddpopt_plan"' in read("--profile", profile):
            plans["tuned"] = Plan.from_file("--profile", profile)
        steps = {name: simulate(plan, found, cost) for name, plan in plans.items()}
        return replace(self, timelines=steps)

    @property
    def plan_tally(self) -> Tally:
        """The numbers of ddpopt's split."""
        plan = self.plan
        waits = [plan.segments_of(bucket) for bucket in plan.buckets]
        early = len(waits) - 1 if self.inline and waits else _early(waits)
        return Tally(len(plan.segments), len(waits), _spread(waits), early, len(plan.unread), recounted=0)

    @property
    def torch_tally(self) -> Tally:
        """The numbers of torch's split."""
        split = self.torch
        if split.failure:
            return Tally()
        waits = [bucket.segments for bucket in split.buckets]
        if not split.segments:
            return Tally(segments=0, buckets=len(waits) or None)
        counted = Tally(len(split.segments), unseen=len(split.unseen), recounted=len(split.recounted))
        if not waits:
            return counted
        return replace(counted, buckets=len(waits), spread=_spread(waits), early=_early(waits))

    def to_json(self) -> str:
        """The explanation as JSON text; ``["plan"]`` is the document that ``Plan.from_json`` reads."""
        summary = {"ddpopt": asdict(self.plan_tally), "torch": asdict(self.torch_tally)}
        document = {"ddpopt_explanation": FORMAT, **asdict(self), "summary": summary}
        return json.dumps({**document, "plan": json.loads(self.plan.to_json())}, indent=2)


def _spread(waits: Sequence[Sequence[int]]) -> int:
    """How many buckets wait on more than one segment."""
    return sum(len(segments) > 1 for segments in waits)


def _early(waits: Sequence[Sequence[int]]) -> int:
    """The number of buckets sent before the last segment's backward; each waits for those before it, too."""
    lowest = min((segments[0] for segments in waits if segments), default=0)
    early = (index for index, segments in enumerate(waits) if segments and segments[0] == lowest)
    return next(early, len(waits))


def _title(explanation: Explanation) -> str:
    buckets = explanation.plan.buckets
    count = sum(len(bucket.params) for bucket in buckets)
    size = mib(sum(bucket.nbytes for bucket in buckets))
    held = f"{count} parameters, {size} MiB"
    return paragraph(f"{explanation.model}: {held}; {_limits(explanation.config)}", "  ")


def _limits(config: BucketConfig) -> str:
    """The limits in words, with DDP's modes, because they decide whether it rebuilds."""
    limits = config.rebuilt_limits
    if len(set(limits)) == 1:
        limits = limits[:1]
    sizes = ", then ".join(f"{limit / MIB:.4g}" for limit in limits)
    closes = "buckets have no limit" if sys.maxsize in limits else f"buckets close at {sizes} MiB"
    modes = [name for name in ("find_unused_parameters", "static_graph") if getattr(config, name)]
    return "; ".join([closes, *modes])


def _summary(explanation: Explanation) -> str:
    tallies = asdict(explanation.plan_tally), asdict(explanation.torch_tally)
    rows = [[label, *("-" if t[key] is None else t[key] for t in tallies)] for key, label in ROWS.items()]
    lines = table([Column(""), *numbers("ddpopt", TORCH)], rows)
    failure = explanation.torch.failure
    return f"{lines}\n{paragraph(f'{TORCH} crashes: {failure}', '  ')}" if failure else lines


def _plan(plan: Plan, *, inline: bool) -> Iterator[str]:
    buckets = [
        (b.index, b.segment, mib(b.nbytes), b.dtype, Noted(names(b.params), b.reason)) for b in plan.buckets
    ]
    columns = [*numbers("bucket", "segment", "MiB"), Column("dtype")]
    title = paragraph(f"ddpopt's plan, in the order of reduction; fingerprint {plan.fingerprint}")
    yield f"{title}\n{table([*columns, Column('gradients, and why the bucket ends there')], buckets)}"
    if inline:
        yield paragraph("No graph is cut: each bucket leaves from inside the backward.", "  ")
    else:
        yield "ddpopt's segments, in the order of backward\n" + _segments(plan)
    if plan.unread:
        yield paragraph(f"No compiled graph reads {names(plan.unread)}.", "  ")


def _segments(plan: Plan) -> str:
    rows = []
    # the part of a cut's reason that is not in the table of buckets
    cuts = {(cut.graph, cut.before): cut.reason.partition(":")[0] for cut in plan.cuts}
    for segment in reversed(plan.segments):
        first = next(iter(segment.nodes), "-")
        why = cuts.get((segment.graph, first), "the graph starts here")
        buckets = ", ".join(map(str, segment.buckets)) or "-"
        rows.append((segment.index, segment.graph, first, len(segment.nodes), buckets, why))
    columns = [*numbers("segment", "graph"), Column("from node"), *numbers("nodes"), Column("completes")]
    return table([*columns, Column("why it is cut there")], rows)


def _ddp(ddp: OwnBuckets) -> Iterator[str]:
    when = "rebuilt in ready order" if ddp.rebuilt else "which it never rebuilds"
    yield f"DDP's own buckets in eager training, {when}\n" + _own_buckets(ddp.buckets, waits=False)
    if ddp.note:
        yield paragraph(ddp.note, "  ")


def _own_buckets(buckets: tuple[OwnBucket, ...], *, waits: bool) -> str:
    columns = [*numbers("bucket", "MiB"), Column("dtype")]
    rows: list[list[object]] = [[b.index, mib(b.nbytes), b.dtype, names(b.params)] for b in buckets]
    if waits:
        columns.insert(1, Column("waits on"))
        for row, bucket in zip(rows, buckets, strict=True):
            row.insert(1, names([str(segment) for segment in reversed(bucket.segments)]))
    return table([*columns, Column("gradients")], rows)


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
    columns = [*numbers("segment", "graph", "MiB counted"), Column("parameters counted")]
    rows = [
        (s.index, s.graph, mib(s.counted_bytes), "as before: the same code" if s.reused else names(s.counted))
        for s in reversed(split.segments)
    ]
    return table(columns, rows)
