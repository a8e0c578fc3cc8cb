"""The plan: which gradients are reduced in which all-reduce, and where the graph is cut for it.

A plan is data. It is made in `ddpopt.planning.planner`, applied in `ddpopt.split.partition` (to graphs)
and `ddpopt.ddp.impose` (to the reducer), and checked in `ddpopt.proof`. It holds only names, so it can be
compared between ranks, stored, and read by people.

Invariant: frozen; equal inputs give equal plans, and equal plans give equal fingerprints, on every rank,
process and platform.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.stored import Stored

Policy = Literal["plan", "ddp"]

Strategy = Literal["split", "inline", "auto"]


@dataclass(frozen=True)
class SentTogether:
    """The gradients that are sent in one all-reduce.

    Attributes:
        index: position in reduction order; bucket 0 is ready first in backward.
        params: names as in ``module.named_parameters()``, in the bucket's order.
        nbytes: sum of ``numel * element_size`` over `params`.
        dtype: for instance ``"float32"``.
        device: for instance ``"cpu"`` or ``"cuda:0"``.
    """

    index: int
    params: tuple[str, ...]
    nbytes: int
    dtype: str
    device: str

    @classmethod
    def of(cls, index: int, specs: Sequence[ParamSpec], *others: Any) -> Self:
        """The bucket that holds these parameters, which share a dtype and a device; and its other fields."""
        nbytes = sum(spec.nbytes for spec in specs)
        names = tuple(spec.name for spec in specs)
        return cls(index, names, nbytes, specs[0].dtype, specs[0].device, *others)


@dataclass(frozen=True)
class Bucket(SentTogether):
    """A bucket of a plan, whose parameters are in ready order.

    Attributes:
        segment: index of the segment whose backward completes this bucket.
        reason: why the bucket ends where it does, in words.
    """

    segment: int
    reason: str


@dataclass(frozen=True)
class Segment:
    """A piece of a forward graph that is compiled on its own.

    Attributes:
        index: position in forward order, over all graphs of the model.
        graph: index of the graph that it is cut from, among the plan's graphs in forward order.
        nodes: names of its nodes in graph order, without placeholders, attributes and output.
        params: parameters whose gradients are complete once this segment's backward has run.
        buckets: indices of the buckets that this segment's backward completes.
    """

    index: int
    graph: int
    nodes: tuple[str, ...]
    params: tuple[str, ...]
    buckets: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """The boundary between two segments.

    Attributes:
        graph: index of the graph that is cut.
        before: name of the first node of the later segment.
        reason: which bucket requires the cut, and why it ends there.
    """

    graph: int
    before: str
    reason: str


@dataclass(frozen=True)
class Plan(Stored):
    """The frozen decision: buckets, segments, cuts, and a reason for each.

    Attributes:
        buckets: in the order in which they are reduced.
        segments: in forward order.
        cuts: in forward order; one fewer than segments in each graph.
        unread: trainable parameters that no graph reads; each is still in a bucket.
        policy: ``"plan"`` if ddpopt decided the buckets and DDP follows them,
            ``"ddp"`` if the buckets were given and ddpopt decided only the cuts.
        group: the process group of the DDP module that follows the plan, in words; empty for the default
            group, and if no module follows it.
    """

    buckets: tuple[Bucket, ...]
    segments: tuple[Segment, ...]
    cuts: tuple[Cut, ...]
    unread: tuple[str, ...] = ()
    policy: Policy = "plan"
    group: str = field(default="", compare=False)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal exactly when two ranks would reduce and cut alike.

        Device indices differ between ranks, so devices are numbered by first appearance. Node names depend
        on the frame that Dynamo starts from, so only the number of nodes counts.
        """
        devices: dict[str, str] = {}
        for bucket in self.buckets:
            kind = bucket.device.partition(":")[0]
            devices.setdefault(bucket.device, f"{kind}#{len(devices)}")
        content = [
            self.policy,
            [[list(b.params), b.nbytes, b.dtype, devices[b.device], b.segment] for b in self.buckets],
            [[s.graph, len(s.nodes), list(s.params)] for s in self.segments],
        ]
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def segments_of(self, bucket: Bucket) -> tuple[int, ...]:
        """Indices of the segments in which the gradients of `bucket` become complete, ascending."""
        members = frozenset(bucket.params)
        return tuple(s.index for s in self.segments if not members.isdisjoint(s.params))

    def document(self) -> dict[str, Any]:
        """The plan as the JSON object that `from_json` reads, which refuses one that was edited."""
        return {**super().document(), "fingerprint": self.fingerprint}

    @classmethod
    def _of(cls, document: dict[str, Any]) -> Self:
        plan = super()._of(document)
        if (found := plan.fingerprint) != (stated := document["fingerprint"]):
            raise ValueError(f"its content has fingerprint {found!r}, but it says {stated!r}: it was edited")
        return plan


def cut_reason(bucket: int, reason: str) -> str:
    """The reason for a cut: which bucket is complete there, and why it ends there."""
    return f"bucket {bucket} is complete: {reason}"
