"""Cuts that break a promise of their plan, for each invariant of `ddpopt.proof.promises`."""

from collections.abc import Mapping
from dataclasses import replace

from tests.unit.stitching import Story
from tests.unit.stories import Mutant, tied_weight


def spread_bucket(told: Story) -> None:
    told.rebucket(0, params=("layer.w2",))
    told.rebucket(1, params=("layer.w1", "layer.b2"))


def plan_at_last_reader(told: Story) -> None:
    """A tied weight is planned where backward meets it first, as if it were complete there."""
    told.rebucket(0, params=("v", "w"))
    told.rebucket(1, params=())


def launch_ddp_bucket_too_early(told: Story) -> None:
    """DDP's own bucket waits for w0, which is complete in segment 0."""
    first, second, third = told.plan.buckets
    first, third = replace(first, params=("layer.w2", "layer.w0")), replace(third, params=("layer.b2",))
    told.replan(policy="ddp", buckets=(first, second, third))


def launch_ddp_bucket_out_of_turn(told: Story) -> None:
    """The second bucket is complete in segment 2, but the one in front of it only in segment 1."""
    first, second, third = told.plan.buckets
    first = replace(first, params=("layer.w1",), segment=1)
    second = replace(second, params=("layer.w2", "layer.b2"), segment=2)
    told.replan(policy="ddp", buckets=(first, second, third))


def swap_buckets(told: Story) -> None:
    first, second, third = told.plan.buckets
    told.replan(buckets=(replace(second, index=0), replace(first, index=1), third))


def plan_one_more_segment(told: Story) -> None:
    extra = replace(told.plan.segments[2], index=3, nodes=(), params=(), buckets=())
    told.replan(segments=(*told.plan.segments, extra))


MUTANTS: Mapping[str, tuple[Mutant, ...]] = {
    "planned nodes": (
        Mutant("node planned in another segment", "segment 1: expected scale, found its end",
               lambda told: told.resegment(1, nodes=(*told.plan.segments[1].nodes, "scale"))),
        Mutant("segment planned and not made", "segment 3: is only in the plan", plan_one_more_segment),
    ),
    "planned cuts": (
        Mutant("cut not planned", "cut 0: expected before scale, found before lin1",
               lambda told: told.replan(cuts=told.plan.cuts[1:])),
    ),
    "one bucket": (
        Mutant("parameter in no bucket", "parameter layer.b2 (read by lin2) is in no bucket",
               lambda told: told.rebucket(0, params=("layer.w2",))),
        Mutant("parameter in two buckets", "parameter layer.b2 is in buckets 0 and 2",
               lambda told: told.rebucket(2, params=("layer.w0", "layer.b2"))),
    ),
    "bucket segment": (
        Mutant("bucket spread over two segments",
               "bucket 1: layer.b2 completes in segment 2 (read by lin2), the bucket in 1", spread_bucket),
        Mutant("tied weight sent at its last reader",
               "bucket 0: w completes in segment 0 (read by lin0), the bucket in 1",
               plan_at_last_reader, tied_weight),
        Mutant("DDP's bucket launched too early", "bucket 0: complete in segment 0, planned for 2",
               launch_ddp_bucket_too_early),
        Mutant("DDP's bucket launched out of turn", "bucket 1: complete in segment 1, planned for 2",
               launch_ddp_bucket_out_of_turn),
    ),
    "bucket order": (
        Mutant("buckets swapped", "bucket 1: completes in segment 2, before bucket 0 of segment 1",
               swap_buckets),
    ),
    "segment contents": (
        Mutant("parameter not listed", "parameter layer.w1: complete in segment 1, listed in no segment",
               lambda told: told.resegment(1, params=())),
        Mutant("bucket not listed", "segment 2: completes buckets (0,), lists ()",
               lambda told: told.resegment(2, buckets=())),
    ),
}  # fmt: skip
"""The mutants that each invariant must reject, by its name."""
