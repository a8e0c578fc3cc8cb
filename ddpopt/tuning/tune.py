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
from typing import Any

import torch
from torch import Tensor

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
    merged = _merged(apart, faster, order[-1].ready_s, most_bytes)

    def end_s(plan: Plan) -> float:
        return round(simulate(plan, profile, link).buckets[-1].back_s, 9)

    # where there are several classes, a merge may change what delays what
    return min((_plan_of_units(merged), _plan_of_units(apart)), key=end_s)


def _plan_of_units(units: Sequence[Unit]) -> Plan:
    groups = [[gradient.spec for gradient in unit] for unit in units]
    return plan_of(groups, "the step ends earliest")


def plan_of(groups: Iterable[Sequence[ParamSpec]], reason: str) -> Plan:
    """A plan with these buckets and no segments, for `ddpopt.impose`."""
    return Plan(tuple(Bucket.of(i, specs, 0, reason) for i, specs in enumerate(groups)), (), ())


def _kind(gradient: Gradient) -> tuple[str, str, str]:
    spec = gradient.spec
    return spec.dtype, spec.device, spec.name if spec.sparse else ""


def _best(gradients: Sequence[Gradient], links: Sequence[Link], most: float) -> list[Unit]:
    """The buckets of the division that is back first over the first link, and of those over the second.

    Column `n` of `free` is the earliest time at which each link is free after the first `n` gradients;
    ``begins[n]`` is where the last run of that division begins.
    """
    kinds = [_kind(gradient) for gradient in gradients]
    total = _running_sum(gradient.spec.nbytes for gradient in gradients)
    sizes: dict[Any, Tensor] = {}
    counts: dict[Any, Tensor] = {}
    for kind in {*kinds}:
        sizes[kind] = _running_sum(g.spec.nbytes * (_kind(g) == kind) for g in gradients)
        counts[kind] = _running_sum(other == kind for other in kinds)
    last_s = gradients[-1].ready_s
    free = torch.zeros(len(links), len(kinds) + 1, dtype=torch.float64)
    begins = [0]
    ready: dict[Any, float] = {}  # of each class so far, in the order of their last gradients
    for end, gradient in enumerate(gradients, 1):
        kind = kinds[end - 1]
        ready.pop(kind, None)
        ready[kind] = gradient.ready_s
        # for each place at which the last run may begin: when the links are free, and what was sent
        at = free[:, :end]
        sent = total[:end]
        for kind, ready_s in ready.items():
            size = sizes[kind][end] - sizes[kind][:end]
            count = counts[kind][end] - counts[kind][:end]
            delay_s = sent * links[0].processor_s_per_byte
            starts = torch.maximum(at, ready_s + delay_s)
            computed_s = last_s + delay_s
            on_links = zip(links, starts, strict=True)
            back = torch.stack([link.back_s(size, start_s, computed_s) for link, start_s in on_links])
            back = back.where((size <= most) | (count == 1), math.inf)
            at = back.where(count > 0, at)
            sent = sent + size
        is_first = at[0] <= at[0].min() * (1 + ROUNDING)
        early = at.where(is_first, math.inf)
        is_early = (early <= early.amin(1, keepdim=True) * (1 + ROUNDING)).all(0)
        # of these the last that leaves the run enough bytes, or else the first
        before = total[:end]
        preference = before.where(before <= total[end] - FINEST * total[-1], -before)
        begin = int(preference.where(is_early, -math.inf).argmax())
        begins.append(begin)
        free[:, end] = at[:, begin]
    return _units(gradients, begins)


def _running_sum(values: Iterable[float]) -> Tensor:
    """The sum of the first `n` values, for each `n` from 0 on."""
    return torch.tensor([0, *values], dtype=torch.float64).cumsum(0)


def _units(gradients: Sequence[Gradient], begins: Sequence[int]) -> list[Unit]:
    """The buckets of a division; within a run, a class whose last gradient comes later is sent later."""
    units: list[Unit] = []
    end = len(gradients)
    while end:
        run: dict[object, Unit] = {}
        for gradient in gradients[begins[end] : end]:
            kind = _kind(gradient)
            run[kind] = (*run.pop(kind, ()), gradient)
        units[:0] = run.values()
        end = begins[end]
    return units


def _merged(buckets: Sequence[Unit], link: Link, last_s: float, most: float) -> list[Unit]:
    """Merge each bucket with those of its class that are complete before a link is free for it."""
    merged = [*buckets]
    free_s = 0.0
    sent = 0.0
    place = 0
    while place < len(merged):
        unit = merged[place]
        delay_s = sent * link.processor_s_per_byte
        begin_s = max(free_s, unit[-1].ready_s + delay_s)
        alike = (n for n in range(place + 1, len(merged)) if _kind(merged[n][0]) == _kind(unit[0]))
        other = next(alike, None)
        if other is not None:
            both = unit + merged[other]
            ready_s = both[-1].ready_s
            late_s = LATE * (ready_s - unit[0].ready_s)
            if ready_s + late_s + delay_s <= begin_s and _bytes(both) <= most:
                merged[place : other + 1] = [*merged[place + 1 : other], both]
                continue
        free_s = link.back_s(_bytes(unit), begin_s, last_s + delay_s)
        sent += _bytes(unit)
        place += 1
    return merged


def _bytes(unit: Unit) -> float:
    return sum(gradient.spec.nbytes for gradient in unit)
