"""The buckets that end the step first in the model of `ddpopt.tuning.simulate`.

Dynamic programming over the ready order: of all its divisions into runs, find the one after which the link is
free first. The earliest time at which the link is free after a run does not depend on what follows. A run is
sent as a bucket for each class (dtype and device; a sparse gradient is a class of its own) in the order of
their last gradients. So with one class no other buckets end the step earlier.

Then a bucket is merged with the next one of its class if the step ends no later, neither on the measured link
nor on a somewhat faster or slower one (`LINKS`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Bucket, Plan
from ddpopt.tuning.records import LARGEST, Gradient, Link, Profile

LINKS = (1.0, 0.8, 1.25)
"""The links on which a merge must not delay the end: how many times as long as measured all-reduces take."""
ROUNDING = 1e-12
"""The relative difference of two times that are equal."""
Kind = tuple[str, str, str]
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
    groups = partition(order, link, most_bytes)
    return plan_of(([g.spec for g in group] for group in groups), "the step ends earliest with these buckets")


def plan_of(groups: Iterable[Sequence[ParamSpec]], reason: str) -> Plan:
    """A plan with these buckets and no segments, for `ddpopt.impose`."""
    return Plan(tuple(Bucket.of(i, specs, 0, reason) for i, specs in enumerate(groups)), (), ())


def partition(gradients: Sequence[Gradient], link: Link, most: float = math.inf) -> list[Unit]:
    """Divide gradients, in ready order, into the buckets that are back first.

    Args:
        gradients: in ready order, at least one.
        link: of the process group.
        most: limit of a bucket's size in bytes.

    Returns:
        The buckets in the order in which they are sent.
    """
    links = [
        replace(link, latency_s=share * link.latency_s, seconds_per_byte=share * link.seconds_per_byte)
        for share in LINKS
    ]
    found = _best(gradients, link, most)
    while len(fewer := _merged(found, links, gradients[-1].ready_s, most)) < len(found):
        found = fewer
    return found


def _kind(gradient: Gradient) -> Kind:
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
    ready: dict[Kind, float] = {}  # of each class so far, in the order of their last gradients
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
        free[end], start = at.min(0)
        came.append(int(start))
    return [*itertools.chain.from_iterable(map(_classes, _runs(gradients, came)))]


def _runs(gradients: Sequence[Gradient], came: Sequence[int]) -> list[Unit]:
    """The runs between the cuts that lead to the end; `came` has for each cut the one before it."""
    ends = [len(gradients)]
    while ends[-1]:
        ends.append(came[ends[-1]])
    return [tuple(gradients[begin:end]) for begin, end in itertools.pairwise(reversed(ends))]


def _classes(run: Unit) -> list[Unit]:
    """A bucket for each class of a run, in the order of their last gradients."""
    found: dict[object, Unit] = {}
    for gradient in run:
        kind = _kind(gradient)
        found[kind] = (*found.pop(kind, ()), gradient)
    return [*found.values()]


def _merged(buckets: Sequence[Unit], links: Sequence[Link], last_s: float, most: float) -> list[Unit]:
    """Merge each bucket with the next one of its class while the end is no later on any link."""
    found = [(_kind(unit[-1]), unit, sum(gradient.spec.nbytes for gradient in unit)) for unit in buckets]

    def times(free: Times, sent: int, rest: Iterable[tuple[object, Unit, int]]) -> Iterator[Times]:
        """When each link is free after each bucket, if it is free then and so much was sent before."""
        for _, unit, nbytes in rest:
            delay = sent * links[0].processor_s_per_byte
            begin = [max(at, unit[-1].ready_s + delay) for at in free]
            free = [link.back_s(nbytes, at, last_s + delay) for link, at in zip(links, begin, strict=True)]
            sent += nbytes
            yield free

    free: Times = [0.0] * len(links)
    sent = place = 0
    after = [*times(free, sent, found)]
    while place < len(found):
        kind, unit, nbytes = found[place]
        other = next((n for n in range(place + 1, len(found)) if found[n][0] == kind), place)
        new: Sequence[Times] = ()
        if other > place and nbytes + found[other][2] <= most:
            merged = [*found[place + 1 : other], (kind, unit + found[other][1], nbytes + found[other][2])]
            rest = itertools.chain(merged, itertools.islice(found, other + 1, None))
            new = _until_no_later(times(free, sent, rest), after[place + 1 :], len(merged))
        if new:
            found[place : other + 1], after[place : place + len(new) + 1] = merged, new
        else:
            free, sent, place = after[place], sent + nbytes, place + 1
    return [unit for _, unit, _ in found]


def _until_no_later(times: Iterable[Times], former: Sequence[Times], least: int) -> list[Times]:
    """Times up to one that is no later than its former one, the first few not counted; empty if none is."""
    found: list[Times] = []
    for new, old in zip(times, former, strict=True):
        found.append(new)
        if len(found) >= least and all(a <= b * (1 + ROUNDING) for a, b in zip(new, old, strict=True)):
            return found
    return []
