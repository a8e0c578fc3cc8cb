"""What `ddpopt.explain` says of a model, as data: ddpopt's plan, DDP's own buckets, torch's DDPOptimizer.

Invariant: frozen; equal models and options give equal explanations, and equal text in every terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddpopt.explanation.text import render
from ddpopt.explanation.torch_split import TorchSegment
from ddpopt.planning.bucket_rule import BucketConfig
from ddpopt.planning.plan import Plan

FORMAT = 1


@dataclass(frozen=True)
class OwnBucket:
    """A bucket that DDP's reducer fills by itself.

    Attributes:
        index: position in reduction order.
        params: names as in ``module.named_parameters()``, in the order in which the bucket holds them.
        nbytes: sum of ``numel * element_size`` over `params`.
        dtype: for instance ``"float32"``.
        device: for instance ``"cpu"`` or ``"cuda:0"``.
        segments: on which of torch's segments it waits, ascending; empty where nothing is compiled.
    """

    index: int
    params: tuple[str, ...]
    nbytes: int
    dtype: str
    device: str
    segments: tuple[int, ...] = ()


@dataclass(frozen=True)
class OwnBuckets:
    """DDP's own buckets for eager training, in reduction order.

    Attributes:
        buckets: after the rebuild if DDP rebuilds them, else those of every iteration.
        rebuilt: whether DDP rebuilds them in ready order.
        note: what limits this prediction, if anything does.
    """

    buckets: tuple[OwnBucket, ...]
    rebuilt: bool
    note: str = ""


@dataclass(frozen=True)
class TorchSplit:
    """What torch's DDPOptimizer does with the same model.

    Attributes:
        segments: in forward order; empty if it fails or compiles nothing.
        buckets: DDP's own buckets, which follow the ready order of this split; empty if not known.
        unseen: parameters that DDP reduces and the optimizer does not count.
        recounted: parameters that it counts more than once.
        alien: parameters that it counts although DDP does not reduce them.
        failure: what it raised; no step runs then.
        notes: what else is to know of this prediction.
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
    """One split in numbers; None where there is nothing to count.

    Attributes:
        segments: how many segments run in a forward.
        buckets: how many buckets DDP reduces.
        spread: how many of them wait on more than one segment.
        early: how many are sent before backward ends; nothing overlaps with the others.
        unseen: parameters that DDP reduces and the split does not count.
        recounted: parameters counted more than once.
    """

    segments: int | None
    buckets: int | None
    spread: int | None
    early: int | None
    unseen: int | None
    recounted: int | None


@dataclass(frozen=True)
class Explanation:
    """One model under ddpopt, under DDP alone, and under torch's DDPOptimizer.

    ``str()`` is the table that ``ddpopt explain`` prints: plain text, at most 80 columns.

    Attributes:
        model: name of the model's class.
        config: DDP's bucket limits and modes.
        plan: ddpopt's plan.
        inline: whether its graphs stay whole, and gradients leave from inside their backward.
        ddp: DDP's own buckets in eager training.
        torch: torch's DDPOptimizer.
    """

    model: str
    config: BucketConfig
    plan: Plan
    inline: bool
    ddp: OwnBuckets
    torch: TorchSplit

    def __str__(self) -> str:
        return render(self)

    @property
    def plan_tally(self) -> Tally:
        """Ddpopt's split in numbers."""
        plan = self.plan
        waits = [plan.segments_of(bucket) for bucket in plan.buckets]
        return Tally(
            segments=len(plan.segments),
            buckets=len(plan.buckets),
            spread=plan.spread,
            early=len(waits) - 1 if self.inline and waits else _early(waits),
            unseen=len(plan.unread),
            recounted=0,
        )

    @property
    def torch_tally(self) -> Tally:
        """Torch's split in numbers."""
        split = self.torch
        if split.failure:
            return Tally(None, None, None, None, None, None)
        waits = [bucket.segments for bucket in split.buckets]
        compiled, known = bool(split.segments), bool(waits)
        return Tally(
            segments=len(split.segments),
            buckets=len(waits) if known else None,
            spread=sum(len(segments) > 1 for segments in waits) if compiled and known else None,
            early=_early(waits) if compiled and known else None,
            unseen=len(split.unseen) if compiled else None,
            recounted=len(split.recounted) if compiled else None,
        )

    def to_json(self) -> str:
        """The explanation as JSON text; ``["plan"]`` is the document that ``Plan.from_json`` reads."""
        document = {
            "ddpopt_explanation": FORMAT,
            "model": self.model,
            "config": asdict(self.config),
            "summary": {"ddpopt": asdict(self.plan_tally), "torch": asdict(self.torch_tally)},
            "plan": json.loads(self.plan.to_json()),
            "inline": self.inline,
            "ddp": asdict(self.ddp),
            "torch": asdict(self.torch),
        }
        return json.dumps(document, indent=2)


def _early(waits: Sequence[Sequence[int]]) -> int:
    """How many buckets leave before the last backward of a segment; each also waits for those before it."""
    lowest = min((segments[0] for segments in waits if segments), default=0)
    early = 0
    for segments in waits:
        if segments and segments[0] == lowest:
            break
        early += 1
    return early
