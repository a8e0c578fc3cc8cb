"""The buckets that end the step first in the model of `ddpopt.tuning.simulate`, found exactly.

Dynamic programming. A state is how many gradients of each class (dtype and device; a sparse gradient is a
class of its own) have been sent. The earliest time at which the link is free in a state does not depend on
what follows, because a bucket starts at the later of that time and its own completion. Buckets are sent in
the order of their last gradients: in any other order a bucket waits for one that is complete later.

Among the partitions that end equally early, also on a link that is somewhat faster or slower (`LINKS`), one
with the fewest buckets is chosen: backwards, each state gets the smallest number of buckets in which the rest
can be sent before that end. If none is among the earliest on all links, the measured one counts.
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
LINKS = ((1.0, 1e-6), (0.8, 0.01), (1.25, 0.01))
"""The links on which ends are compared: how many times as long as measured an all-reduce takes, and by what
share a later end is equal to the earliest."""


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
    """The dynamic programming over the states, for all `LINKS`; sizes and times are float64 tensors."""

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
        delays = torch.zeros(self.shape, dtype=torch.float64)
        for axis, sums in enumerate(self.sums):
            delays += self._along(axis, sums) * link.processor_s_per_byte
        self.delays, self.computed = delays, delays + units[-1][-1].ready_s
        self.start: Place = (0,) * len(kinds)
        self.end: Place = (-1,) * len(kinds)

    def buckets(self) -> list[Unit]:
        """The best partition."""
        ends = self._free()[:, *self.end]
        ties = torch.tensor([tie for _, tie in LINKS], dtype=torch.float64)
        following = self._fewest(ends * (1 + ties))
        while following[self.start] < 0:  # none is among the earliest on all links, or rounding hides it
            ends, ties = ends[:1], 2 * ties[:1]
            following = self._fewest(ends * (1 + ties))
        state = [0] * len(self.shape)
        found: list[Unit] = []
        while state != [size - 1 for size in self.shape]:
            place = int(following[tuple(state)])
            axis, to = self.axis[place], self.before[place][self.axis[place]] + 1
            found.append(tuple(itertools.chain(*self.own[axis][state[axis] : to])))
            state[axis] = to
        return found

    def _free(self) -> Tensor:
        """For each link and state, when the link is free at the earliest."""
        free = torch.full((len(LINKS), *self.shape), math.inf, dtype=torch.float64)
        free[:, *self.start] = 0.0
        for place, unit in enumerate(self.units):
            earlier, here, cost = self._around(place)
            started = torch.maximum(free[:, *earlier], unit[-1].ready_s + self.delays[earlier])
            overlap = torch.minimum((self.computed[earlier] - started).clamp(0.0), self.link.busy * cost)
            ended = started + cost + overlap * (1 - 1 / self.link.busy)
            free[:, *here] = ended.amin(self.axis[place] + 1)
        return free

    def _fewest(self, ends: Tensor) -> Tensor:
        """For each state, the last unit of the next bucket, so that the fewest follow and end by `ends`.

        Of equally few those for which the link is needed last. A link for each end.
        """
        count = torch.full(self.shape, len(self.units) + 1.0, dtype=torch.float64)
        needed = torch.full((len(ends), *self.shape), -math.inf, dtype=torch.float64)
        count[self.end], needed[:, *self.end] = 0.0, ends
        following = torch.full(self.shape, -1)
        for place in reversed(range(len(self.units))):
            axis = self.axis[place]
            earlier, here, cost = self._around(place)
            idle = needed[:, *here].unsqueeze(axis + 1) - cost[: len(ends)]
            overlap = (self.computed[earlier] - idle).clamp(0.0).minimum(cost[: len(ends)])
            begin = idle - overlap * (self.link.busy - 1)
            more = count[here].unsqueeze(axis) + 1
            fits = (self.units[place][-1].ready_s + self.delays[earlier] <= begin).all(0)
            later = begin[0] > needed[:, *earlier][0]
            better = fits & ((more < count[earlier]) | (more == count[earlier]) & later)
            for best, found in ((count, more), (following, torch.tensor(place))):
                best[earlier] = found.where(better, best[earlier])
            needed[:, *earlier] = begin.where(better, needed[:, *earlier])
        return following

    def _around(self, place: int) -> tuple[Place, Place, Tensor]:
        """The states from which a bucket that ends with this unit is sent, those after it, and its costs."""
        axis, before = self.axis[place], self.before[place]
        to = before[axis]
        earlier: Place = tuple(slice(0, count + 1) for count in before)
        here: Place = (*earlier[:axis], to + 1, *earlier[axis + 1 :])
        nbytes = self.sums[axis][to + 1] - self.sums[axis][: to + 1]
        cost = (nbytes * self.link.seconds_per_byte).clamp(self.link.latency_s)
        cost[:-1] = cost[:-1].where(nbytes[:-1] <= self.most, math.inf)
        return earlier, here, torch.stack([share * self._along(axis, cost) for share, _ in LINKS])

    def _along(self, axis: int, values: Tensor) -> Tensor:
        return values.reshape([-1 if other == axis else 1 for other in range(len(self.own))])
