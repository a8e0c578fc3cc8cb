r"""How far a run that trains freely may be from eager's, number by number and step by step.

Rounding errors of a step change where the next step begins, so they add up, and grow where the model
amplifies them. How much is not derived but seen: eager trains again and again on data that rounding cannot
tell apart (`ddpopt.judge.rules.rounding`), and the distances of these neighbors from eager at a step span the
envelope there.

Everything is a pure function of arrays, in float64. Invariant: a distance of NaN or infinity is never within
an envelope.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddpopt.judge.rules.arithmetic import (
    COARSE,
    COARSE_SCALARS,
    CREDIBLE,
    FINE_SCALARS,
    quadratic_mean,
)
from ddpopt.judge.rules.factors import FALSE_ALARM, centered_factor

Array = NDArray[Any]
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


def scale_of(eager: Array, dtype: torch.dtype) -> Scale:
    """The scale of a number of eager's.

    Args:
        eager: its values.
        dtype: the dtype that it was computed in.
    """
    value = _finite(eager)
    if not dtype.is_floating_point:
        return Scale(_rms(value), 0.0, 0.0)
    info = torch.finfo(dtype)
    units = np.abs(value) * info.eps + info.smallest_normal * info.eps
    return Scale(_rms(value), _rms(units), float(units.max(initial=0.0)))


def distance(got: Array, eager: Array) -> Distance:
    """How far a number is from eager's, of the same shape."""
    value = got.astype(np.float64)
    reference = eager.astype(np.float64)
    with np.errstate(all="ignore"):
        error = value - reference
    if not np.isfinite(error).all():
        alike = _alike(value, reference)
        if not (alike | np.isfinite(error)).all():
            return NOWHERE
        error = np.where(alike, 0.0, error)
        reference = _finite(reference)
    size = float(np.vdot(reference, reference))
    bias = abs(float(np.vdot(error, reference))) / size if size else 0.0
    return Distance(_rms(error), float(np.abs(error).max(initial=0.0)), bias)


def ulps(got: Array, eager: Array, dtype: torch.dtype) -> float:
    """The largest difference in units in the last place; infinite for whole numbers that differ."""
    if not dtype.is_floating_point:
        return 0.0 if np.array_equal(got, eager) else math.inf
    info = torch.finfo(dtype)
    value = got.astype(np.float64)
    reference = eager.astype(np.float64)
    size = np.maximum(np.abs(value), np.abs(reference)).clip(info.smallest_normal)
    with np.errstate(all="ignore"):
        off = np.abs(value - reference) / np.ldexp(info.eps, np.frexp(size)[1] - 1)
    off = np.where(_alike(value, reference), 0.0, np.where(np.isnan(off), math.inf, off))
    return float(off.max(initial=0.0))


def _alike(value: Array, reference: Array) -> Array:
    return np.equal(value, reference) | (np.isnan(value) & np.isnan(reference))


def _finite(value: Array) -> Array:
    return np.where(np.isfinite(value), value, 0.0).astype(np.float64)


def _rms(value: Array) -> float:
    return math.sqrt(float(np.vdot(value, value)) / value.size) if value.size else 0.0


def is_explained(scale: Scale, neighbors: Sequence[Distance], own: Distance) -> bool:
    """Whether a run in float64 is as near to eager as rounding explains, so that it took the same path.

    Args:
        scale: of eager's number.
        neighbors: the distances of its neighbors.
        own: the distance of the run in float64.
    """
    spread = quadratic_mean([each.rms for each in neighbors])
    return own.rms <= CREDIBLE * envelope_factor(len(neighbors)) * max(spread, scale.unit)


@dataclass(frozen=True)
class Band:
    """The envelope of one number at one step.

    Attributes:
        size: the root mean square of eager's values.
        rms: the largest root mean square of a distance that it allows.
        largest: the largest difference of one element that it allows.
        bias: how far the projection on eager's values may be from 1.
        spread: the root mean square distance of the neighbors, with what they share.
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


ROUNDINGS = 4.0
"""Units in the last place by which a number that no neighbor moves may differ: each run rounds it, and may
add it up in another order."""


def band(
    scale: Scale, neighbors: Sequence[Distance], own: Distance | None = None, chance: float = FALSE_ALARM
) -> Band:
    """The envelope that the neighbors of a number span.

    Args:
        scale: of eager's number.
        neighbors: the distances of its neighbors; a neighbor that has no such number is infinitely far.
        own: the distance of a run in float64: the errors that eager and all its neighbors share, such as that
            of one order of summation. None if there is none, or it took another path.
        chance: the probability of calling a right number wrong.

    Returns:
        The envelope. It is at least as wide as the rounding of the number itself.
    """
    factor = envelope_factor(len(neighbors), chance)
    spread = quadratic_mean([each.rms for each in neighbors])
    own = own or Distance(0.0, 0.0, 0.0)
    if not is_explained(scale, neighbors, own):  # errors that all elements share do not average out
        own = replace(own, bias=own.rms / scale.rms if scale.rms else math.inf)
    spread = math.hypot(spread, own.rms)
    largest = math.hypot(quadratic_mean([each.largest for each in neighbors]), own.largest)
    bias = math.hypot(quadratic_mean([each.bias for each in neighbors]), own.bias)
    unit = scale.unit / scale.rms if scale.rms else math.inf
    in_common = COARSE_SCALARS if unit > COARSE else FINE_SCALARS
    return Band(
        size=scale.rms,
        rms=factor * spread + ROUNDINGS * scale.unit,
        largest=factor * largest + ROUNDINGS * scale.largest_unit,
        bias=factor * bias + in_common * unit,
        spread=spread,
    )
