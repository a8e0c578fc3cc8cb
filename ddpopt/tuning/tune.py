"""The buckets that end the step first in the model of `ddpopt.tuning.simulate`.

Dynamic programming over the ready order: of all its divisions into runs, find the one after which the link is
free first. The earliest time at which the link is free after a run does not depend on what follows. A run is
sent as a bucket for each class (dtype and device; a sparse gradient is a class of its own) in the order of
their last gradients. So with one class no other buckets end the step earlier.

Of the divisions that end equally early, the one that ends first on a faster link is chosen (`FASTER`). Where
a run may still begin at several gradients, it begins at the last one that leaves it `FINEST` of all bytes,
or else at the first. Then buckets of one class that wait for the link together are merged, if they would
also on the faster one, and with gradients that are complete later than measured (`LATE`). So no merge leaves
the link idle; if the end is later all the same, nothing is merged.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Bucket, Plan
from ddpopt.tuning.records import LARGEST, Gradient, Link, Profile
from ddpopt.tuning.simulate import simulate

FASTER = 0.8
"""The time of an all-reduce on the faster link, as a share of the measured time."""
FINEST = 0.05
"""The share of all bytes that a run has at least, if it is back as early as with fewer."""
LATE = 0.25
"""How much longer the gradients of a merged bucket may take to be complete, and still wait."""
ROUNDING = 1e-12
"""The relative difference of two times that are equal."""
Unit = tuple[Gradient, ...]
"""Gradients that are sent together: one bucket."""


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
    faster = replace(link, latency_s=FASTER * link.latency_s, seconds_per_byte=FASTER * link.seconds_per_byte)
    apart = _best(order, (link, faster), most_bytes)
    found = _merged(apart, faster, order[-1].ready_s, most_bytes), apart
    plans = [plan_of(([g.spec for g in unit] for unit in each), "the step ends earliest") for each in found]
    # where there are several classes, a merge may change what delays what
    return min(plans, key=lambda plan: round(simulate(plan, profile, link).buckets[-1].back_s, 9))


def plan_of(groups: Iterable[Sequence[ParamSpec]], reason: str) -> Plan:
    """A plan with these buckets and no segments, for `ddpopt.impose`."""
    return Plan(tuple(Bucket.of(i, specs, 0, reason) for i, specs in enumerate(groups)), (), ())


def _kind(gradient: Gradient) -> tuple[str, str, str]:
    spec = gradient.spec
    return spec.dtype, spec.device, spec.name if spec.sparse else ""


def _best(gradients: Sequence[Gradient], links: Sequence[Link], most: float) -> list[Unit]:
    """The buckets of the division that is back first over the first link, and of those over the second."""
    kinds = [*map(_kind, gradients)]
    own = {kind: torch.tensor([0, *(each == kind for each in kinds)]) for kind in {*kinds}}
    nbytes = torch.tensor([0, *(gradient.spec.nbytes for gradient in gradients)], dtype=torch.float64)
    sizes = {kind: (nbytes * mask).cumsum(0) for kind, mask in own.items()}
    counts = {kind: mask.cumsum(0) for kind, mask in own.items()}
    total, last_s = nbytes.cumsum(0), gradients[-1].ready_s
    free = torch.zeros(len(links), len(kinds) + 1, dtype=torch.float64)
    ready: dict[Any, Any] = {}  # of each class so far, in the order of their last gradients
    came = [0]
    for end, gradient in enumerate(gradients, 1):
        ready.pop(kinds[end - 1], None)
        ready[kinds[end - 1]] = gradient.ready_s
        at, sent, before = free[:, :end], total[:end], total[:end]
        for kind, ready_s in ready.items():
            size, count = (sums[kind][end] - sums[kind][:end] for sums in (sizes, counts))
            delay = sent * links[0].processor_s_per_byte
            given = repeat(size), torch.maximum(at, ready_s + delay), repeat(last_s + delay)
            back = torch.stack([*map(Link.back_s, links, *given)])
            back = back.where((size <= most) | (count == 1), math.inf)
            at, sent = back.where(count > 0, at), sent + size
        early = at.where(at[0] <= at[0].min() * (1 + ROUNDING), math.inf)
        first = (early <= early.amin(1, keepdim=True) * (1 + ROUNDING)).all(0)
        wanted = before.where(before <= total[end] - FINEST * total[-1], -before)
        came.append(int(wanted.where(first, -math.inf).argmax()))
        free[:, end] = at[:, came[-1]]
    found: list[Unit] = []
    while end:
        run: dict[object, Unit] = {}
        for gradient in gradients[came[end] : end]:
            run[_kind(gradient)] = (*run.pop(_kind(gradient), ()), gradient)
        found[:0], end = run.values(), came[end]
    return found


def _merged(buckets: Sequence[Unit], link: Link, last_s: float, most: float) -> list[Unit]:
    """Merge each bucket with those of its class that are complete before a link is free for it."""
    found, free, sent, place = [*buckets], 0.0, 0.0, 0
    while place < len(found):
        unit, delay = found[place], sent * link.processor_s_per_byte
        begin = max(free, unit[-1].ready_s + delay)
        other = next((n for n in range(place + 1, len(found)) if _kind(found[n][0]) == _kind(unit[0])), place)
        both, ready_s = unit + found[other], found[other][-1].ready_s
        late_s = LATE * (ready_s - unit[0].ready_s)
        if other > place and ready_s + late_s + delay <= begin and _bytes(both) <= most:
            found[place : other + 1] = [*found[place + 1 : other], both]
            continue
        free = link.back_s(_bytes(unit), begin, last_s + delay)
        sent, place = sent + _bytes(unit), place + 1
    return found


def _bytes(unit: Unit) -> float:
    return sum(gradient.spec.nbytes for gradient in unit)
