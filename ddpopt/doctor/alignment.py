"""The running reducer's buckets beside the segments of each mode: which bucket waits for what.

Buckets are those of the run. Segments, and which gradients each completes, are those that `ddpopt.explain`
predicts for the same model.

Invariant: nothing is said of segments that did not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from ddpopt.doctor.diagnosis import Alignment, Finding, Overcounted, RealBucket, Weight
from ddpopt.doctor.trial import OURS, TORCH, Trial
from ddpopt.explanation.result import Explanation, OwnBucket, Tally
from ddpopt.explanation.tables import MIB, mib, names

_USE_DDPOPT = "Compile with ddpopt.compile(ddp) in place of torch.compile(ddp)"
_NO_OTHER = "Lower or raise bucket_cap_mb until it matters less: ddpopt did not run to its end here"


def align(trial: Trial, explanation: Explanation | None) -> Alignment:
    """Say on which segments each running bucket of a trial waits.

    Args:
        trial: one that ran to its end.
        explanation: the prediction of segments; None if there is none.

    Returns:
        The alignment.
    """
    cut = explanation is not None and trial.notes.graphs > 0 and not trial.inline
    completes_in = _completes_in(trial.mode, explanation) if explanation is not None and cut else {}
    buckets = tuple(
        RealBucket(
            index=bucket.index,
            params=bucket.params,
            nbytes=bucket.nbytes,
            segments=tuple(sorted({completes_in[name] for name in bucket.params if name in completes_in})),
        )
        for bucket in trial.buckets
    )
    tally = _tally(trial, explanation, completes_in) if explanation is not None and completes_in else None
    return Alignment(
        mode=trial.mode,
        segments=tally.segments if tally else None,
        buckets=buckets,
        early=tally.early if tally else None,
        spread=tally.spread if tally else None,
        inline=trial.inline,
    )


def _completes_in(mode: str, explanation: Explanation) -> dict[str, int]:
    split = explanation.plan.segments if mode == OURS else explanation.torch.segments
    return {name: segment.index for segment in split for name in segment.params}


def _tally(trial: Trial, explanation: Explanation, completes_in: Mapping[str, int]) -> Tally:
    if trial.mode == OURS:  # the reducer follows the plan
        return explanation.plan_tally
    real = tuple(
        OwnBucket(
            index=bucket.index,
            params=bucket.params,
            nbytes=bucket.nbytes,
            dtype=bucket.dtype,
            device=bucket.device,
            segments=tuple(sorted({completes_in[name] for name in bucket.params if name in completes_in})),
        )
        for bucket in trial.buckets
    )
    return replace(explanation, torch=replace(explanation.torch, buckets=real)).torch_tally


def find_overcounted(model: nn.Module, explanation: Explanation | None) -> tuple[Overcounted, ...]:
    """Parameters that torch's optimizer counts at more bytes than DDP reduces.

    It adds the bytes of a parameter's whole storage, once for each place in the graph that reads it.

    Args:
        model: the module inside DDP.
        explanation: what torch's optimizer makes of it; None if that is not known.

    Returns:
        Them, in the order in which the optimizer first counts them.
    """
    if explanation is None:
        return ()
    counted = [name for s in explanation.torch.segments if not s.reused for name in s.counted]
    parameters = dict(model.named_parameters())
    found = []
    for name in dict.fromkeys(name for name in counted if name in parameters):
        parameter = parameters[name]
        nbytes = parameter.numel() * parameter.element_size()
        over = Overcounted(name, nbytes, counted.count(name), parameter.untyped_storage().nbytes())
        if over.times * over.storage_bytes > nbytes:
            found.append(over)
    return tuple(found)


def alignment_findings(
    alignments: Sequence[Alignment], explanation: Explanation | None, overcounted: Sequence[Overcounted]
) -> Iterator[Finding]:
    """What the alignment costs under torch's optimizer.

    Args:
        alignments: those of the modes that ran to their end.
        explanation: the prediction of segments; None if there is none.
        overcounted: what `find_overcounted` found.
    """
    by_mode = {alignment.mode: alignment for alignment in alignments}
    theirs, ours = by_mode.get(TORCH), by_mode.get(OURS)
    step = _USE_DDPOPT if ours is not None else _NO_OTHER
    if theirs is not None and theirs.segments is not None and _is_better(ours, theirs):
        yield _waits(theirs, inline=ours is not None and ours.inline)
    if explanation is None or not explanation.torch.segments:
        return
    unread = set(explanation.plan.unread)
    unseen = [name for name in explanation.torch.unseen if name not in unread]
    if unseen:
        yield Finding(
            "buckets",
            Weight.SLOW,
            f"torch's optimizer does not see {names(unseen)}: it looks at the positional arguments of each "
            "operation, not at keyword arguments and not into lists. It makes no cut for them.",
            f"{step}; or pass these weights as positional arguments.",
        )
    if overcounted:
        yield _overcounted(overcounted, step)


def _is_better(ours: Alignment | None, theirs: Alignment) -> bool:
    """Whether buckets leave earlier under ddpopt, and there is enough to send for that to matter."""
    if ours is None or len(ours.buckets) < 2 or sum(bucket.nbytes for bucket in ours.buckets) <= MIB:
        return False
    if ours.inline:
        return len(theirs.buckets) < 2 or bool(theirs.spread) or theirs.early == 0
    return (ours.early or 0) > (theirs.early or 0) or (ours.spread or 0) < (theirs.spread or 0)


def _waits(theirs: Alignment, *, inline: bool) -> Finding:
    count = len(theirs.buckets)
    if theirs.segments == 1:
        what = "the graph is one segment, so all gradients come when its backward has ended."
    elif count == 1:
        what = "all gradients are one bucket, which leaves when the last of them is there."
    elif theirs.early == 0:
        what = (
            f"none of {count} buckets can leave before the last of {theirs.segments} segments has run its "
            "backward, so no all-reduce overlaps with backward."
        )
    else:
        what = (
            f"{theirs.spread} of {count} buckets wait for more than one of {theirs.segments} segments; "
            f"{theirs.early} of {count} can leave before the last segment's backward."
        )
    why = "its gradients leave from inside the backward" if inline else "its cuts follow the buckets"
    return Finding("buckets", Weight.SLOW, f"Under {theirs.mode} {what}", f"{_USE_DDPOPT}: {why}.")


def _overcounted(overcounted: Sequence[Overcounted], step: str) -> Finding:
    counted = sum(over.times * over.storage_bytes for over in overcounted)
    true = sum(over.nbytes for over in overcounted)
    again = [over.name for over in overcounted if over.times > 1]
    views = [over.name for over in overcounted if over.storage_bytes > over.nbytes]
    why = []
    if again:
        why.append(f"once for each place that reads it: {names(again)}")
    if views:
        why.append(f"at the size of the storage that it is a part of: {names(views)}")
    return Finding(
        "buckets",
        Weight.SLOW if counted - true >= MIB else Weight.NOTE,
        f"torch's optimizer counts {mib(counted)} MiB where DDP reduces {mib(true)} MiB, so its cuts do not "
        f"fall where buckets end. It counts a parameter {', and '.join(why)}.",
        f"{step}.",
    )
