"""The buckets that end the step first in the model of `ddpopt.tuning.simulate`, found exactly.

Dynamic programming. A state is how many gradients of each class (dtype and device; a sparse gradient is a class
of its own) have been sent. The earliest time at which the link is free in a state does not depend on what
follows, because a bucket starts at the later of that time and its own completion. Buckets are sent in the order
of their last gradients: in any other order a bucket waits for one that is complete later.

Among the partitions that end equally early one with the fewest buckets is chosen: backwards, each state gets
the smallest number of buckets in which the rest can be sent before that end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpopt.planning.plan import Bucket, Plan
from ddpopt.tuning.records import Gradient, Link, Profile, order_of

MOST_STEPS = 60_000_000
"""Transitions to try at most: about two seconds. With more, gradients that follow each other are merged first."""
TIE = 1e-9
"""Two ends that differ by less than this share are equal."""


def tune(profile: Profile, link: Link, most_bytes: int | None = None) -> Plan:
    """Find the buckets that end the step first.

    Args:
        profile: of the model.
        link: of the process group.
        most_bytes: limit of a bucket's size in bytes; a gradient above it is sent alone.

    Returns:
        A plan with these buckets and no segments, for `ddpopt.impose`.
    """
    groups = partition(order_of(profile.gradients), link, most_bytes)
    end = "the step ends earliest with these buckets"
    buckets = (Bucket.of(i, [g.spec for g in group], 0, end) for i, group in enumerate(groups))
    return Plan(tuple(buckets), (), ())


@dataclass(frozen=True)
class _Unit:
    """Gradients that are sent together in any case; mostly one."""

    members: tuple[Gradient, ...]
    kind: object
    nbytes: int
    ready_s: float


def partition(gradients: Sequence[Gradient], link: Link, most_bytes: int | None = None) -> list[list[Gradient]]:
    """Divide gradients, in ready order, into the buckets that are back first.

    Args:
        gradients: in ready order.
        link: of the process group.
        most_bytes: as for `tune`.

    Returns:
        The buckets in the order in which they are sent.
    """
    units = [_Unit((g,), _kind(g, place), g.spec.nbytes, g.ready_s) for place, g in enumerate(gradients)]
    while _steps(units) > MOST_STEPS:
        units = _merged(units, most_bytes)
    return _Search(units, link, most_bytes).buckets() if units else []


def _kind(gradient: Gradient, place: int) -> object:
    spec = gradient.spec
    return (spec.dtype, spec.device, place if spec.sparse else -1)


def _steps(units: Sequence[_Unit]) -> float:
    counts: dict[object, int] = {}
    for unit in units:
        counts[unit.kind] = counts.get(unit.kind, 0) + 1
    states = 1.0
    for count in counts.values():
        states *= count + 1
    return states * sum(counts.values()) / (2 * len(counts) or 1)


def _merged(units: Sequence[_Unit], most_bytes: int | None) -> list[_Unit]:
    """Half as many units: each pair that follows each other in its class becomes one, if it may."""
    found: list[_Unit | None] = []
    half: dict[object, int] = {}
    for unit in units:
        place = half.pop(unit.kind, None)
        first = None if place is None else found[place]
        if first is not None and place is not None and first.nbytes + unit.nbytes <= (most_bytes or float("inf")):
            found[place] = None
            members = (*first.members, *unit.members)
            unit = _Unit(members, unit.kind, first.nbytes + unit.nbytes, unit.ready_s)
        else:
            half[unit.kind] = len(found)
        found.append(unit)
    return [unit for unit in found if unit is not None]


class _Search:
    """The dynamic programming over the states; sizes and times are float64 tensors."""

    def __init__(self, units: Sequence[_Unit], link: Link, most_bytes: int | None) -> None:
        self.units, self.link = units, link
        kinds = list(dict.fromkeys(unit.kind for unit in units))
        self.axis = [kinds.index(unit.kind) for unit in units]
        self.own = [[unit for unit in units if unit.kind == kind] for kind in kinds]
        self.sums = [_sums([unit.nbytes for unit in own]) for own in self.own]
        self.shape = [len(own) + 1 for own in self.own]
        self.most = float("inf") if most_bytes is None else float(most_bytes)
        # for each unit, how many units of each class precede it
        self.before: list[list[int]] = []
        counts = [0] * len(kinds)
        for axis in self.axis:
            self.before.append(list(counts))
            counts[axis] += 1
        self.sent = torch.zeros(self.shape, dtype=torch.float64)
        for axis, sums in enumerate(self.sums):
            self.sent += sums.reshape([-1 if other == axis else 1 for other in range(len(kinds))])

    def buckets(self) -> list[list[Gradient]]:
        """The best partition."""
        end = float(self._free()[(-1,) * len(self.shape)])
        following = self._fewest(end * (1 + TIE))
        state = [0] * len(self.shape)
        found: list[list[Gradient]] = []
        while state != [size - 1 for size in self.shape]:
            place = int(following[tuple(state)])
            axis, to = self.axis[place], self.before[place][self.axis[place]] + 1
            chosen = self.own[axis][state[axis] : to]
            found.append([gradient for unit in chosen for gradient in unit.members])
            state[axis] = to
        return found

    def _free(self) -> Tensor:
        """For each state, when the link is free at the earliest."""
        free = torch.full(self.shape, float("inf"), dtype=torch.float64)
        free[(0,) * len(self.shape)] = 0.0
        for place, unit in enumerate(self.units):
            earlier, here, nbytes = self._around(place)
            started = torch.maximum(free[earlier], self._complete(unit, earlier))
            ended = started + self.link.latency_s + nbytes * self.link.seconds_per_byte
            free[here] = ended.amin(self.axis[place])
        return free

    def _fewest(self, end: float) -> Tensor:
        """For each state, the last unit of the next bucket, so that the fewest follow and all are back by `end`."""
        many = len(self.units) + 1.0
        count = torch.full(self.shape, many, dtype=torch.float64)
        count[(-1,) * len(self.shape)] = 0.0
        following = torch.full(self.shape, -1)
        total = float(self.sent.max())
        for place in reversed(range(len(self.units))):
            axis = self.axis[place]
            earlier, here, nbytes = self._around(place)
            more = count[here].unsqueeze(axis) + 1
            rest = (total - self.sent[here].unsqueeze(axis) + nbytes) * self.link.seconds_per_byte
            ended = self._complete(self.units[place], earlier) + more * self.link.latency_s + rest
            more = more.expand_as(ended).where(ended <= end, many)
            better = more < count[earlier]
            count[earlier] = more.where(better, count[earlier])
            following[earlier] = torch.where(better, place, following[earlier])
        return following

    def _around(self, place: int) -> tuple[tuple[slice | int, ...], tuple[slice | int, ...], Tensor]:
        """The states from which a bucket that ends with this unit is sent, those after it, and its sizes."""
        axis, before = self.axis[place], self.before[place]
        to = before[axis]
        slices = [slice(0, count + 1) for count in before]
        earlier = tuple(slices)
        here = tuple(to + 1 if other == axis else each for other, each in enumerate(slices))
        nbytes = self.sums[axis][to + 1] - self.sums[axis][: to + 1]
        nbytes[:-1] = nbytes[:-1].where(nbytes[:-1] <= self.most, float("inf"))
        return earlier, here, nbytes.reshape([-1 if other == axis else 1 for other in range(len(before))])

    def _complete(self, unit: _Unit, earlier: tuple[slice | int, ...]) -> Tensor:
        """When a bucket that ends with this unit is complete, by what was sent before it."""
        return unit.ready_s + self.sent[earlier] * self.link.processor_s_per_byte


def _sums(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.float64)
