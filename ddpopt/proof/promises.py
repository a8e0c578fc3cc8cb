"""Invariants of the plan: the cuts lie where it says, and each bucket is complete when it says.

A gradient is complete once the backward of its earliest differentiable reader has run. The evidence derives
this reader from the graph; these invariants compare the plan's buckets and segments with it.
"""

import itertools
from collections.abc import Iterator

from ddpopt.proof.evidence import Evidence


def segments_hold_the_planned_nodes(evidence: Evidence) -> Iterator[str]:
    """Each segment holds the nodes that the plan lists for it, in that order."""
    found: dict[int, list[str]] = {index: [] for index in evidence.stitched.ends}
    for step in evidence.stitched.steps:
        found[step.segment].append(step.name)
    planned = {segment.index: list(segment.nodes) for segment in evidence.plan.segments}
    for index in sorted({*planned, *found}):
        expected = planned.get(index)
        actual = found.get(index)
        if expected is None or actual is None:
            yield f"segment {index}: is only in the {'plan' if actual is None else 'stitched module'}"
            continue
        for a, b in itertools.zip_longest(expected, actual):
            if a != b:
                yield f"segment {index}: expected {a or 'its end'}, found {b or 'its end'}"
                break


def cuts_open_segments(evidence: Evidence) -> Iterator[str]:
    """The first nodes of the segments after the first are those of the plan's cuts, in order."""
    first_nodes: dict[int, str] = {}
    for step in evidence.stitched.steps:
        first_nodes.setdefault(step.segment, step.name)
    found = [first_nodes.get(index, "nothing") for index in list(evidence.stitched.ends)[1:]]
    cuts = [cut.before for cut in evidence.plan.cuts]
    for number, (a, b) in enumerate(itertools.zip_longest(cuts, found)):
        if a != b:
            yield f"cut {number}: expected before {a or 'nothing'}, found before {b or 'nothing'}"


def params_are_in_one_bucket(evidence: Evidence) -> Iterator[str]:
    """Each trainable parameter that gets a gradient is in one bucket, and none is in two."""
    buckets: dict[str, list[int]] = {name: [] for name in evidence.readers}
    for bucket in evidence.plan.buckets:
        for param in bucket.params:
            buckets.setdefault(param, []).append(bucket.index)
    for param, found in buckets.items():
        if not found:
            yield f"parameter {param} (read by {evidence.readers[param]}) is in no bucket"
        elif len(found) > 1:
            yield f"parameter {param} is in buckets {' and '.join(map(str, found))}"


def buckets_complete_as_planned(evidence: Evidence) -> Iterator[str]:
    """Each bucket completes in its segment; with policy "plan" all of its parameters do."""
    homes = _homes(evidence)
    launch = len(evidence.plan.segments)
    for bucket in evidence.plan.buckets:
        completed = {param: homes[param] for param in bucket.params if param in homes}
        if evidence.plan.policy == "plan":
            for param, segment in completed.items():
                if segment != bucket.segment:
                    yield (
                        f"bucket {bucket.index}: {param} completes in segment {segment} "
                        f"(read by {evidence.readers[param]}), the bucket in {bucket.segment}"
                    )
        elif completed:
            # the reducer launches in list order, so a bucket waits for those before it
            launch = min(launch, *completed.values())
            if bucket.segment != launch:
                yield f"bucket {bucket.index}: complete in segment {launch}, planned for {bucket.segment}"


def buckets_follow_backward(evidence: Evidence) -> Iterator[str]:
    """Buckets are numbered in reduction order, and this order never returns to a later segment."""
    buckets = evidence.plan.buckets
    for place, bucket in enumerate(buckets):
        if bucket.index != place:
            yield f"bucket {bucket.index} is at place {place}"
    for before, bucket in itertools.pairwise(buckets):
        if bucket.segment > before.segment:
            yield (
                f"bucket {bucket.index}: completes in segment {bucket.segment}, "
                f"before bucket {before.index} of segment {before.segment}"
            )


def segments_list_what_they_complete(evidence: Evidence) -> Iterator[str]:
    """Each segment lists the parameters and buckets that its backward completes."""
    homes = _homes(evidence)
    planned = {param: s.index for s in evidence.plan.segments for param in s.params}
    for param in dict.fromkeys([*homes, *planned]):
        expected = homes.get(param)
        found = planned.get(param)
        if expected != found:
            yield f"parameter {param}: complete in {_segment(expected)}, listed in {_segment(found)}"
    completed: dict[int, list[int]] = {segment.index: [] for segment in evidence.plan.segments}
    for bucket in evidence.plan.buckets:
        completed.setdefault(bucket.segment, []).append(bucket.index)
    for segment in evidence.plan.segments:
        if segment.buckets != (buckets := tuple(completed[segment.index])):
            yield f"segment {segment.index}: completes buckets {buckets}, lists {segment.buckets}"


def _homes(evidence: Evidence) -> dict[str, int]:
    """For each parameter that gets a gradient, the segment of its earliest differentiable reader."""
    segments = {step.name: step.segment for step in reversed(evidence.stitched.steps)}
    return {param: segments[node] for param, node in evidence.readers.items() if node in segments}


def _segment(index: int | None) -> str:
    return "no segment" if index is None else f"segment {index}"
