r"""How far a run that trains freely may be from eager's, number by number and step by step.

Rounding errors of a step change where the next step begins, so they add up, and grow where the model
amplifies them. How much is not derived but seen: eager trains again and again on data that rounding cannot
tell apart (`ddpopt.judge.rules.rounding`), and the distances of these neighbors from eager at a step span the
envelope there.

Everything is a pure function of tensors, in float64. Invariant: a distance of NaN or infinity is never within
an envelope.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddpopt.judge.compare import dense, exact, largest, rms, same
from ddpopt.judge.rules.arithmetic import (
    COARSE,
    COARSE_SCALARS,
    FALSE_ALARM,
    FINE_SCALARS,
    centered_factor,
    projection,
)

NEIGHBORS = 12
"""Runs on neighboring data; with fewer the envelope is much wider, with more it hardly becomes narrower."""


def envelope_factor(neighbors: int, chance: float = FALSE_ALARM) -> float:
    r"""How many times farther from eager than its neighbors, in root mean square, one more run may be.

    Eager :math:`x_0`, its n neighbors :math:`x_i` and the run :math:`y` that is judged are equally right. Let
    m and s be the mean of the neighbors and the root of their mean square deviation from it. The distance
    from eager, not from the mean, is what can be found without keeping all runs, so let
    :math:`a = |x_0 - m|` and r the neighbors' root mean square distance from eager:
    :math:`r^2 = s^2 + a^2`. By Cauchy and Schwarz

    .. math:: |y - x_0| \le |y - m| + a \le \sqrt{(|y - m| / s)^2 + 1} \cdot r

    and :math:`|y - m| / s` exceeds `centered_factor` with the given chance.

    >>> round(envelope_factor(12), 1)
    10.6
    """
    return math.hypot(centered_factor(neighbors, chance), 1.0)


@dataclass(frozen=True)
class Distance:
    """How far a number is from eager's.

    Attributes:
        rms: root mean square of the differences.
        largest: the largest difference.
        bias: how far its projection on eager's is from 1: what all elements have in common.
    """

    rms: float
    largest: float
    bias: float

    @property
    def is_finite(self) -> bool:
        """Whether it says anything."""
        return math.isfinite(self.rms) and math.isfinite(self.largest)


NOWHERE = Distance(math.inf, math.inf, math.inf)
"""The distance of a number that is missing, or has NaN or infinity where eager has none."""


@dataclass(frozen=True)
class Scale:
    """The size of one of eager's numbers, and of the rounding of the number itself.

    Attributes:
        rms: root mean square of its elements.
        unit: root mean square of the distance of each element to the next number of its dtype.
        largest_unit: the largest of them.
    """

    rms: float
    unit: float
    largest_unit: float


def scale_of(eager: Tensor) -> Scale:
    """The scale of a number of eager's."""
    value = _finite(exact(eager))
    kind = dense(eager).dtype
    if not kind.is_floating_point:
        return Scale(rms(value), 0.0, 0.0)
    info = torch.finfo(kind)
    units = value.abs() * info.eps + info.smallest_normal * info.eps
    return Scale(rms(value), rms(units), largest(units))


def distance(got: Tensor, eager: Tensor) -> Distance:
    """How far a number is from eager's, of the same shape and dtype."""
    value, reference = exact(got), exact(eager)
    if not bool((same(value, reference) | (value.isfinite() & reference.isfinite())).all()):
        return NOWHERE
    value, reference = _finite(value), _finite(reference)
    error = (value - reference).abs()
    return Distance(rms(error), largest(error), abs(projection(value, reference) - 1))


def _finite(value: Tensor) -> Tensor:
    return value.where(value.isfinite(), 0)


@dataclass(frozen=True)
class Band:
    """The envelope of one number at one step.

    Attributes:
        size: the root mean square of eager's values.
        rms: the largest root mean square of a distance that it allows.
        largest: the largest difference of one element that it allows.
        bias: how far the projection on eager's values may be from 1.
        spread: the root mean square distance of the neighbors.
    """

    size: float
    rms: float
    largest: float
    bias: float
    spread: float

    @property
    def says_something(self) -> bool:
        """Whether it is narrower than the values themselves: in a wider one even zeros would be right."""
        return self.rms < self.size or (self.spread == 0 and math.isfinite(self.rms))

    def reach(self, found: Distance) -> "Reach":
        """The measure by which a number goes farthest, as a share of what is allowed."""
        reaches = [
            Reach("root mean square", found.rms, self.rms),
            Reach("largest difference", found.largest, self.largest),
        ]
        if self.spread < self.size:  # the projection on noise says nothing
            reaches.append(Reach("factor that all elements have in common, off 1 by", found.bias, self.bias))
        return max(reaches, key=lambda reach: reach.share)


@dataclass(frozen=True)
class Reach:
    """How far into its envelope a number goes.

    Attributes:
        measure: what is measured.
        error: the distance from eager by that measure.
        bound: what is allowed.
    """

    measure: str
    error: float
    bound: float

    @property
    def share(self) -> float:
        """The distance as a share of what is allowed; above 1 is outside."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 and math.isfinite(self.error) else math.inf


def band(scale: Scale, neighbors: Sequence[Distance], chance: float = FALSE_ALARM) -> Band:
    """The envelope that the neighbors of a number span.

    Args:
        scale: of eager's number.
        neighbors: the distances of its neighbors; a neighbor that has no such number is infinitely far.
        chance: the probability of calling a right number wrong.

    Returns:
        The envelope. It is at least as wide as the rounding of the number itself.
    """
    factor = envelope_factor(len(neighbors), chance)
    spread = _norm([each.rms for each in neighbors])
    unit = scale.unit / scale.rms if scale.rms else math.inf
    scalars = COARSE_SCALARS if unit > COARSE else FINE_SCALARS
    return Band(
        size=scale.rms,
        rms=factor * spread + scale.unit,
        largest=factor * _norm([each.largest for each in neighbors]) + scale.largest_unit,
        bias=factor * _norm([each.bias for each in neighbors]) + scalars * unit,
        spread=spread,
    )


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
