"""The buckets that end the step first in the model of `ddpopt.tuning.simulate`, found exactly.

Dynamic programming. A state is how many gradients of each class (dtype and device; a sparse gradient is a
class of its own) have been sent. The earliest time at which the link is free in a state does not depend on
what follows, because a bucket starts at the later of that time and its own completion. Buckets are sent in
the order of their last gradients: in any other order a bucket waits for one that is complete later.

Among the partitions that end equally early (`TIE`) one with the fewest buckets is chosen: backwards, each
state gets the smallest number of buckets in which the rest can be sent before that end.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ddpopt.planning.plan import Plan
from ddpopt.tuning.records import LARGEST, Gradient, Link, Profile, order_of, plan_of

MOST_STEPS = 60_000_000
"""Transitions to try at most, about two seconds. With more, neighbouring gradients are merged first."""
Place = tuple[slice | int, ...]
TIE = 1e-3
"""Ends that differ by less than this share are equal: no measurement tells them apart."""


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
    groups = partition(order_of(profile.gradients), link, most_bytes)
    return plan_of(([g.spec for g in group] for group in groups), "the step ends earliest with these buckets")


Unit = tuple[Gradient, ...]
"""Gradients of one class that are sent together in any case; mostly one."""


def partition(gradients: Sequence[Gradient], link: Link, most: float = math.inf) -> list[Unit]:
    """Divide gradients, in ready order, into the buckets that are back first.

    Args:
        gradients: in ready order.
        link: of the process group.
        most: limit of a bucket's size in bytes.

    Returns:
        The buckets in the order in which they are sent.
    """
    size = 1
    while _steps(units := _units(gradients, most, size)) > MOST_STEPS:
        size *= 2
    return _BestBuckets(units, link, most).buckets() if units else []


def _kind(unit: Unit) -> tuple[str, str, str]:
    spec = unit[0].spec
    return spec.dtype, spec.device, spec.name if spec.sparse else ""


def _nbytes(unit: Unit) -> int:
    return sum(gradient.spec.nbytes for gradient in unit)


def _units(gradients: Sequence[Gradient], most: float, size: int) -> list[Unit]:
    """Put up to `size` gradients that follow each other in their class into one unit."""
    found: dict[str, Unit] = {}  # by its last gradient
    begun: dict[object, Unit] = {}
    for gradient in gradients:
        unit: Unit = (gradient,)
        kind = _kind(unit)
        before = begun.get(kind, ())
        if 0 < len(before) < size and _nbytes(before + unit) <= most:
            del found[before[-1].spec.name]
            unit = before + unit
        begun[kind] = found[gradient.spec.name] = unit
    return [*found.values()]


def _steps(units: Sequence[Unit]) -> float:
    counts = Counter(map(_kind, units))
    return math.prod(count + 1 for count in counts.values()) * len(units) / (2 * len(counts) or 1)


class _BestBuckets:
    """The dynamic programming over the states; sizes and times are float64 tensors."""

    def __init__(self, units: Sequence[Unit], link: Link, most: float) -> None:
        self.units, self.link, self.most = units, link, most
        kinds = list(dict.fromkeys(map(_kind, units)))
        self.axis = [kinds.index(_kind(unit)) for unit in units]
        self.own = [[unit for unit in units if _kind(unit) == kind] for kind in kinds]
        sizes = ([0, *itertools.accumulate(map(_nbytes, own))] for own in self.own)
        self.sums = [torch.tensor(each, dtype=torch.float64) for each in sizes]
        self.shape = [len(own) + 1 for own in self.own]
        # for each unit, how many units of each class precede it
        ones = torch.nn.functional.one_hot(torch.tensor(self.axis), len(kinds))
        self.before: list[list[int]] = (ones.cumsum(0) - ones).tolist()
        self.sent = torch.zeros(self.shape, dtype=torch.float64)
        for axis, sums in enumerate(self.sums):
            self.sent += self._along(axis, sums)
        self.delays = self.sent * link.processor_s_per_byte

    def buckets(self) -> list[Unit]:
        """The best partition."""
        end = float(self._free()[(-1,) * len(self.shape)])
        following = self._fewest(end * (1 + TIE))
        state = [0] * len(self.shape)
        found: list[Unit] = []
        while state != [size - 1 for size in self.shape]:
            place = int(following[tuple(state)])
            axis, to = self.axis[place], self.before[place][self.axis[place]] + 1
            found.append(tuple(itertools.chain(*self.own[axis][state[axis] : to])))
            state[axis] = to
        return found

    def _free(self) -> Tensor:
        """For each state, when the link is free at the earliest."""
        free = torch.full(self.shape, float("inf"), dtype=torch.float64)
        free[(0,) * len(self.shape)] = 0.0
        for place, unit in enumerate(self.units):
            earlier, here, nbytes = self._around(place)
            started = torch.maximum(free[earlier], unit[-1].ready_s + self.delays[earlier])
            ended = started + self.link.latency_s + nbytes * self.link.seconds_per_byte
            free[here] = ended.amin(self.axis[place])
        return free

    def _fewest(self, end: float) -> Tensor:
        """For each state, the last unit of the next bucket, so that the fewest follow and end by `end`."""
        many = len(self.units) + 1.0
        count = torch.full(self.shape, many, dtype=torch.float64)
        count[(-1,) * len(self.shape)] = 0.0
        following, total = torch.full(self.shape, -1), self.sent.max()
        for place in reversed(range(len(self.units))):
            axis = self.axis[place]
            earlier, here, nbytes = self._around(place)
            more = count[here].unsqueeze(axis) + 1
            rest = (total - self.sent[here].unsqueeze(axis) + nbytes) * self.link.seconds_per_byte
            ended = self.units[place][-1].ready_s + self.delays[earlier] + more * self.link.latency_s + rest
            more = more.expand_as(ended).where(ended <= end, many)
            better = more < count[earlier]
            count[earlier] = more.where(better, count[earlier])
            following[earlier] = torch.where(better, place, following[earlier])
        return following

    def _around(self, place: int) -> tuple[Place, Place, Tensor]:
        """The states from which a bucket that ends with this unit is sent, those after it, and its sizes."""
        axis, before = self.axis[place], self.before[place]
        to = before[axis]
        earlier: Place = tuple(slice(0, count + 1) for count in before)
        here: Place = (*earlier[:axis], to + 1, *earlier[axis + 1 :])
        nbytes = self.sums[axis][to + 1] - self.sums[axis][: to + 1]
        nbytes[:-1] = nbytes[:-1].where(nbytes[:-1] <= self.most, math.inf)
        return earlier, here, self._along(axis, nbytes)

    def _along(self, axis: int, values: Tensor) -> Tensor:
        return values.reshape([-1 if other == axis else 1 for other in range(len(self.own))])
