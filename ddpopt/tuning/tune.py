"""The buckets that end the step first in the model of `ddpopt.tuning.simulate`.

Dynamic programming over the ready order: of all its divisions into runs, find the one after which the link is
free first. The earliest time at which the link is free after a run does not depend on what follows. A run is
sent as a bucket for each class (dtype and device; a sparse gradient is a class of its own) in the order of
their last gradients. So with one class no other buckets end the step earlier.

Where a run may begin at several gradients and be back equally early, it begins at the last one that leaves it
`FINEST` of all bytes, or else at the first. Then a bucket is merged with the next one of its class if the
step ends no later, neither on the measured link nor on a somewhat faster or slower one (`LINKS`), even
if the merged bucket is complete somewhat later than measured (`LATE`): computation is not regular, and a
large bucket that comes late leaves the link idle for long.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Bucket, Plan
from ddpopt.tuning.records import LARGEST, Gradient, Link, Profile

LINKS = (1.0, 0.8, 1.25)
"""The links on which a merge must not delay the end: how many times as long as measured all-reduces take."""
FINEST = 0.05
"""The share of all bytes that a run has at least, if it is back as early as with fewer."""
LATE = 0.25
"""How much longer the gradients of a merged bucket may take to be complete without delaying the end."""
ROUNDING = 1e-12
"""The relative difference of two times that are equal."""
Unit = tuple[Gradient, ...]
"""Gradients that are sent together: one bucket."""
Times = Sequence[float]
"""A time for each of `LINKS`."""


def tune(profile: Profile, link: Link, most_bytes: float = LARGEST) -> Plan:
    """Find the buckets that end the step first.

    Args:
        profile: of the model.
        link: of the process group.
        most_bytes: limit of a bucket's size in bytes; a gradient above it is sent alone. By default no bucket
            is larger than the all-reduces that were measured.

    Returns:
        A plan with these buckets and no segments, for `ddpopt.impose`.
    """
    order = sorted(profile.gradients, key=lambda gradient: gradient.ready_s)
    latency_s, per_byte = link.latency_s, link.seconds_per_byte
    links = [replace(link, latency_s=x * latency_s, seconds_per_byte=x * per_byte) for x in LINKS]
    found = _best(order, link, most_bytes)
    while len(fewer := _merged(found, links, order[-1].ready_s, most_bytes)) < len(found):
        found = fewer
    return plan_of(([g.spec for g in unit] for unit in found), "the step ends earliest with these buckets")


def plan_of(groups: Iterable[Sequence[ParamSpec]], reason: str) -> Plan:
    """A plan with these buckets and no segments, for `ddpopt.impose`."""
    return Plan(tuple(Bucket.of(i, specs, 0, reason) for i, specs in enumerate(groups)), (), ())


def _kind(gradient: Gradient) -> tuple[str, str, str]:
    spec = gradient.spec
    return spec.dtype, spec.device, spec.name if spec.sparse else ""


def _best(gradients: Sequence[Gradient], link: Link, most: float) -> list[Unit]:
    """The buckets of the division that is back first."""
    kinds = [*map(_kind, gradients)]
    own = {kind: torch.tensor([0, *(each == kind for each in kinds)]) for kind in {*kinds}}
    nbytes = torch.tensor([0, *(gradient.spec.nbytes for gradient in gradients)], dtype=torch.float64)
    sizes = {kind: (nbytes * mask).cumsum(0) for kind, mask in own.items()}
    counts = {kind: mask.cumsum(0) for kind, mask in own.items()}
    total, last_s = nbytes.cumsum(0), gradients[-1].ready_s
    free = torch.zeros(len(kinds) + 1, dtype=torch.float64)
    ready: dict[Any, Any] = {}  # of each class so far, in the order of their last gradients
    came = [0]
    for end, gradient in enumerate(gradients, 1):
        ready.pop(kinds[end - 1], None)
        ready[kinds[end - 1]] = gradient.ready_s
        at, sent = free[:end], total[:end]
        for kind, ready_s in ready.items():
            size, count = (sums[kind][end] - sums[kind][:end] for sums in (sizes, counts))
            delay = sent * link.processor_s_per_byte
            back = link.back_s(size, torch.maximum(at, ready_s + delay), last_s + delay)
            back = back.where((size <= most) | (count == 1), math.inf)
            at, sent = back.where(count > 0, at), sent + size
        free[end], before = at.min(), total[:end]
        wanted = before.where(before <= total[end] - FINEST * total[-1], -before)
        came.append(int(wanted.where(at <= free[end] * (1 + ROUNDING), -math.inf).argmax()))
    found: list[Unit] = []
    while end:
        run: dict[object, Unit] = {}
        for gradient in gradients[came[end] : end]:
            run[_kind(gradient)] = (*run.pop(_kind(gradient), ()), gradient)
        found[:0], end = run.values(), came[end]
    return found


def _merged(buckets: Sequence[Unit], links: Sequence[Link], last_s: float, most: float) -> list[Unit]:
    """Merge each bucket with the next one of its class, once, if the end is no later on any link."""
    found = [(_kind(own[-1]), own, sum(each.spec.nbytes for each in own), own[-1].ready_s) for own in buckets]

    def times(free: Times, sent: int, rest: Iterable[Any], old: Iterable[Times], least: int) -> list[Times]:
        """When each link is free after each bucket, if it is free then and so much was sent before.

        Up to where that is no later than formerly, but for at least some buckets; empty if it is never so.
        """
        found: list[Times] = []
        for (_, _, nbytes, ready_s), was in zip(rest, old, strict=True):
            delay = sent * links[0].processor_s_per_byte
            begin = [max(at, ready_s + delay) for at in free]
            free = [link.back_s(nbytes, at, last_s + delay) for link, at in zip(links, begin, strict=True)]
            found.append(free)
            sent += nbytes
            if len(found) >= least and all(a <= b * (1 + ROUNDING) for a, b in zip(free, was, strict=True)):
                return found
        return []

    free: Times = [0.0] * len(links)
    sent = place = 0
    after = times(free, sent, found, [[math.inf] * len(links)] * len(found), len(found))
    while place < len(found):
        kind, unit, nbytes, _ = found[place]
        other = next((n for n in range(place + 1, len(found)) if found[n][0] == kind), place)
        _, added, more, ready_s = found[other]
        if other > place and nbytes + more <= most:
            late_s = LATE * (ready_s - unit[0].ready_s)
            merged = [*found[place + 1 : other], (kind, unit + added, nbytes + more, ready_s + late_s)]
            rest = itertools.chain(merged, itertools.islice(found, other + 1, None))
            if new := times(free, sent, rest, after[place + 1 :], len(merged)):
                found[place : other + 1], after[place : place + len(new) + 1] = merged, new
        free, sent, place = after[place], sent + found[place][2], place + 1
    return [unit for _, unit, _, _ in found]
