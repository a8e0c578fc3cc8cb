"""A predicted timeline of a step: when each bucket is complete, sent and back.

The model: gradients become complete at their profiled times; the link carries one bucket after another, in
the plan's order; what was sent before a bucket has delayed the computation of its gradients by
`Link.processor_s_per_byte`, and sending takes `Link.busy` times as long until the last gradient is complete.
After the last bucket the optimizer runs.

The reducer's copies, into the buckets and back, are in the times of the profile, whose buckets hold one
gradient each; that fewer and larger copies take less time is not modelled.

Nor are several all-reduces that share the link at the same time (all are back as early, but not each); other
traffic, such as DDP's broadcast of buffers or a model's own collectives; a rank that is slower than the
others, or that starts later; gradients that a compiler would order differently because of the plan; and an
optimizer that begins before the last bucket is back. A bucket counts as delayed by all bytes that were sent
before it, even by those that were sent while nothing was computed.

Invariant: equal inputs give equal timelines.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from ddpopt.errors import UsageError
from ddpopt.planning.plan import Plan
from ddpopt.tuning.records import Link, Profile

PARTS = 256
"""The steps in which the delay of a byte is calibrated, up to the time of sending it."""


@dataclass(frozen=True)
class Sent:
    """One bucket on its way.

    Attributes:
        index: of the bucket.
        nbytes: its size in bytes.
        ready_s: when its last gradient is complete, in seconds after the step began, as all other times.
        sent_s: when its all-reduce starts.
        back_s: when its all-reduce ends.
        params: its parameters' names, if known.
    """

    index: int
    nbytes: int
    ready_s: float
    sent_s: float
    back_s: float
    params: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A predicted step.

    Attributes:
        buckets: in the order in which they are sent.
        forward_s: when backward begins, in seconds after the step began.
        backward_s: when the computation of backward ends.
        reduced_s: when the last bucket is back, and the update begins.
        step_s: when the step ends.
    """

    buckets: tuple[Sent, ...]
    forward_s: float
    backward_s: float
    reduced_s: float
    step_s: float

    @property
    def exposed_s(self) -> float:
        """Communication that no computation hides, in seconds."""
        return self.reduced_s - self.backward_s


def simulate(plan: Plan, profile: Profile, link: Link) -> Timeline:
    """Predict a step.

    Args:
        plan: the buckets.
        profile: of the model.
        link: of the process group.

    Returns:
        When each bucket is complete, sent and back, and when the step ends.

    Raises:
        UsageError: the plan's gradients are not those of the profile; the message says which.
    """
    ready_s = {gradient.spec.name: gradient.ready_s for gradient in profile.gradients}
    sizes = {gradient.spec.name: gradient.spec.nbytes for gradient in profile.gradients}
    held = [(each, [sizes.pop(name, math.nan) for name in each.params]) for each in plan.buckets]
    differing = [*sizes, *(name for each, own in held if sum(own) != each.nbytes for name in each.params)]
    if differing:
        several = f"{len(differing)} parameters differ, such as {differing[0]!r}"
        raise UsageError(f"the plan and the profile are of different models: {several}; make both of one")
    free = latest = delay = 0.0
    computed = profile.backward_s
    begin = profile.forward_s
    last = max(ready_s.values(), default=0.0)
    found: list[Sent] = []
    for bucket in plan.buckets:
        latest = max([latest, *(ready_s[name] for name in bucket.params)])
        start = max(free, latest + delay)
        free = link.back_s(bucket.nbytes, start, last + delay)
        work = bucket.nbytes * link.processor_s_per_byte
        computed = _delayed(computed, start, free, work)
        # what is sent before a bucket, but after its gradients are complete, does not delay it
        times = begin + min(start, latest + delay), begin + start, begin + free
        found.append(Sent(bucket.index, bucket.nbytes, *times, bucket.params))
        delay += work
    reduced = begin + max(computed, free)
    return Timeline(tuple(found), begin, begin + computed, reduced, reduced + profile.update_s)


def calibrated(link: Link, plan: Plan, profile: Profile, end_s: float) -> Link:
    """The link, with the delay that a model's computation had while buckets were sent.

    Args:
        link: of the process group.
        plan: the buckets.
        profile: of the model.
        end_s: when the last gradient was complete, in seconds after the step began.

    Returns:
        A link with another `processor_s_per_byte`.
    """
    links = [replace(link, processor_s_per_byte=link.seconds_per_byte * n / PARTS) for n in range(PARTS + 1)]
    return links[bisect_left(links, end_s, hi=PARTS, key=lambda of: simulate(plan, profile, of).backward_s)]


def _delayed(computed: float, start: float, end: float, work: float) -> float:
    """When computation ends, not at `computed`, if sending from `start` to `end` takes `work` from it."""
    if computed <= start or end <= start:
        return computed
    slowed = min(work / (end - start), 0.99)
    return min(start + (computed - start) / (1 - slowed), computed + work)
