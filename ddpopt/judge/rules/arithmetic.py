r"""L2, the arithmetic of compiled code: its error must be one that eager could have made.

The effect of eager's rounding on a number is learned from eager steps on data that rounding cannot
distinguish (`ddpopt.judge.rules.rounding` runs them); this module evaluates their results. Everything is a
pure function of tensors, in float64.

Invariant: all zeros do not pass where the truth is more than noise, and a number that noise may hide passes
only with a note.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddpopt.judge.compare import (
    NOT_FINITE,
    Difference,
    Sum,
    communication_bound,
    dense,
    exact,
    largest,
    region_of,
    rms,
    same,
    ulps,
    unit_roundoff,
)
from ddpopt.judge.rules.factors import FALSE_ALARM, centered_factor, tail_factor

CREDIBLE = 10.0
"""A float64 reference this many times further from eager than eager's own spread took another path."""
COARSE = 1e-4
"""A relative unit of rounding above this is that of a dtype in which scalars are not computed."""
COARSE_SCALARS = 4.0
FINE_SCALARS = 64.0
"""Roundings of a scalar, in units in the last place, that a whole tensor may have in common.

A number that is a tensor of its own may have as many: it is often a sum, such as a loss, and compiled code
adds one element after the other where eager adds in pairs.
"""
OCTAVES = 6
"""Rows that differ by more than this power of 2 are of different size."""
NOISE = "nothing but noise"
HIDDEN = "rounding may be as large as these values, so a wrong value may pass at L2"
ZERO_TOO = "all zeros, as in eager, where float64 has other values"


@dataclass(frozen=True)
class RowGroup:
    """Rows of a tensor, along its first dimension, whose values and errors are of similar size.

    Attributes:
        index: the rows.
        mean_square: root mean square over the samples of the root mean square of their errors in these rows.
        largest: root mean square over the samples of their largest error in these rows.
        factor: how many times larger one more error may be.
    """

    index: Tensor
    mean_square: float
    largest: float
    factor: float


@dataclass(frozen=True)
class Arithmetic:
    """The effect of rounding on one number in eager, in float64.

    Attributes:
        truth: the number without rounding; 0 where eager has NaN or infinity.
        mean_square: root mean square over the samples of the root mean square of their errors.
        largest: root mean square over the samples of their largest error.
        floor: the error from rounding the result itself, element by element.
        factor: how many times larger than eager's errors one more error may be.
        eager: the number as eager computes it, with its NaNs and infinities.
        settled: where all samples are finite.
        scale: root mean square over the samples of how far their projection on the truth is from 1.
        rows: groups of rows of different size; empty if all are alike.
        note: how the truth was found, if not in float64.
    """

    truth: Tensor
    mean_square: float
    largest: float
    floor: Tensor
    factor: float
    eager: Tensor
    settled: Tensor
    scale: float = math.inf
    rows: tuple[RowGroup, ...] = ()
    note: str = ""

    @property
    def scale_bound(self) -> float:
        """How far the projection on the truth may be from 1: a bias of all elements does not average out.

        A scalar that all elements have in common, such as the 1 / n of a mean, may be rounded a few times.
        """
        size = rms(self.truth)
        unit = rms(self.floor) / size if size else math.inf
        return self.factor * self.scale + unit * (COARSE_SCALARS if unit > COARSE else FINE_SCALARS)

    @property
    def rms_bound(self) -> float:
        """The largest allowed root mean square of an error."""
        return self.factor * self.mean_square + rms(self.floor)

    @property
    def largest_bound(self) -> float:
        """The largest allowed element of an error."""
        return self.factor * self.largest + largest(self.floor)

    @property
    def is_noise(self) -> bool:
        """Whether rounding alone can produce the number although the true value is zero."""
        return rms(self.truth) <= max(self.mean_square, rms(self.floor))


def arithmetic_of(
    samples: Sequence[Tensor],
    reference: Tensor | None,
    terms: Sum | None = None,
    sent_as: torch.dtype | None = None,
    chance: float = FALSE_ALARM,
    *,
    same_path: bool = False,
) -> Arithmetic:
    """L2: learn the size of eager's rounding errors from eager runs on neighboring data.

    A number and its neighbor in its dtype are both roundings of the value half way between them, each off by
    at most one unit roundoff. So a step on data where each number is replaced by one of its two neighbors is
    as right as the step on the original data, and the errors of such steps are samples of the rounding of
    this number in this model.

    The floor is the error from rounding the result alone. For a mean over ranks it comes from its terms, as
    at L1 (`communication_bound`): terms that cancel leave their rounding errors, not zero. For anything else
    it is one unit in the last place, or the smallest subnormal number; for a tensor of one element,
    `FINE_SCALARS` units.

    Args:
        samples: results of the eager step, the unperturbed one first, then perturbed ones.
        reference: the result of the same step in float64; None if the model cannot run in float64, or is not
            reproducible.
        terms: the contributions of the ranks, if the result is their mean.
        sent_as: the dtype in which it is summed, if not its own.
        chance: the probability of calling a right number wrong; smaller where there are more of them.
        same_path: whether the float64 run is known to take eager's path, as its forward shows. Then it may be
            far from all samples: where tanh is almost 1, its derivative is a rounding error that they share.

    Returns:
        The truth and the size of eager's errors. If there is no reference, or it took another path (another
        dropout mask, a branch not taken), the samples' mean is used instead.
    """
    stacked = torch.stack([exact(sample) for sample in samples])
    eager = stacked[0]
    settled = stacked.isfinite().all(0)
    values = stacked.where(settled, 0)
    center = values.mean(0)
    factor = centered_factor(len(values), chance)
    truth = center
    note = "no float64 reference"
    kind = dense(samples[0]).dtype
    # an integer that rounding does not change is exact
    dtype = kind if kind.is_floating_point else torch.float64
    is_near = False
    if reference is not None:
        is_near = is_near_eager(samples, reference)
        note = "float64 takes a different path through this model"
        if same_path or is_near:
            factor = tail_factor(len(values), chance)
            truth = exact(reference).where(settled, 0)
            note = ""
    mean_square = quadratic_mean([rms(value - truth) for value in values])
    scale = quadratic_mean([projection(value, truth) - 1 for value in values])
    if not (note or is_near):  # errors that all elements share do not average out in a projection
        scale = mean_square / rms(truth) if truth.any() else math.inf
    return Arithmetic(
        truth=truth,
        mean_square=mean_square,
        largest=quadratic_mean([largest((value - truth).abs()) for value in values]),
        floor=_floor(truth, terms, dtype, sent_as),
        factor=factor,
        eager=eager,
        settled=settled,
        scale=scale,
        rows=_rows_of_different_size(truth, values, chance, centered=bool(note)),
        note=note,
    )


def is_near_eager(samples: Sequence[Tensor], reference: Tensor | None) -> bool:
    """Whether a number in float64 is as near to eager's as rounding explains, so that it took the same path.

    Args:
        samples: as for `arithmetic_of`.
        reference: the number in float64; None if there is none, which is near to nothing.
    """
    if reference is None:
        return False
    stacked = torch.stack([exact(sample) for sample in samples])
    settled = stacked.isfinite().all(0)
    values = stacked.where(settled, 0)
    found = exact(reference).where(settled, 0)
    spread = quadratic_mean([rms(value - values.mean(0)) for value in values])
    kind = dense(samples[0]).dtype
    unit = unit_roundoff(kind if kind.is_floating_point else torch.float64)
    reach = max(spread, unit * rms(found))
    return rms(values[0] - found) <= CREDIBLE * tail_factor(len(values)) * reach


def projection(value: Tensor, truth: Tensor) -> float:
    """The factor by which a multiple of the truth comes nearest to a value; 1 for a truth of zeros."""
    size = float(truth.square().sum())
    return float((value * truth).sum()) / size if size else 1.0


def _rows_of_different_size(
    truth: Tensor, values: Tensor, chance: float, *, centered: bool
) -> tuple[RowGroup, ...]:
    """Group the rows by the size of their values, or of their errors if those are larger.

    In one bound for all, a row of an embedding whose values are a thousandth of the largest row's could be
    zero, or anything, unnoticed.

    Args:
        truth: the number without rounding.
        values: the samples, stacked.
        chance: as for `arithmetic_of`.
        centered: whether the truth is the samples' own mean.

    Returns:
        The groups; none if all rows are of similar size, or there is one row only.
    """
    if truth.dim() < 2 or truth.numel() == 0:
        return ()
    errors = (values - truth).abs().flatten(2)
    of_errors = errors.square().mean((0, 2)).sqrt()
    size = torch.maximum(truth.flatten(1).square().mean(1).sqrt(), of_errors)
    grades = torch.where(size > 0, torch.log2(size) / OCTAVES, -math.inf).floor()
    distinct: list[float] = sorted(set(grades.tolist()))
    if len(distinct) < 2:
        return ()
    chance = chance / len(distinct)
    factor = centered_factor(len(values), chance) if centered else tail_factor(len(values), chance)
    groups = []
    for grade in distinct:
        index = (grades == grade).nonzero().flatten()
        own = errors[:, index]
        mean_square = float(own.square().mean().sqrt())
        top = float(own.flatten(1).amax(1).square().mean().sqrt())
        groups.append(RowGroup(index, mean_square, top, factor))
    return tuple(groups)


def _floor(truth: Tensor, terms: Sum | None, dtype: torch.dtype, sent_as: torch.dtype | None) -> Tensor:
    info = torch.finfo(dtype)
    is_sum = truth.numel() == 1 and info.eps <= COARSE
    own = truth.abs() * info.eps * (FINE_SCALARS if is_sum else 1) + info.smallest_normal * info.eps
    if terms is None:
        return own
    bound = communication_bound(terms, dtype, sent_as)
    return torch.where(bound.isfinite(), torch.maximum(bound, own), own)


def arithmetic(got: Tensor, eager: Arithmetic) -> Difference:
    """L2: compare a compiled number, whose error may be as large as eager's.

    The root mean square and the largest element of the error may each be eager's own times the factor, plus
    the floor. All zeros pass only if the truth is no larger than noise, or if eager itself has all zeros.
    Where eager has NaN or infinity, the same is required. Numbers that are nothing but noise, or may be
    hidden by it, are noted.

    Args:
        got: the result of compiled code, with the shape of the truth (complex numbers stay complex).
        eager: the effect of rounding in eager.

    Returns:
        The root mean square of the error, and its bound; or the largest element and its bound, if that is
        exceeded.
    """
    found = _judged_as_a_whole(got, eager)
    if found.right:
        return found
    value = exact(got)
    error = (value - eager.truth).abs()
    odd = ~same(value.isfinite(), eager.eager.isfinite())
    for bound in (eager.largest_bound, eager.rms_bound, 0.0):
        outside = (error > bound) & eager.settled | odd
        if region := region_of(outside, error.where(~odd, math.inf), value, eager.truth):
            return replace(found, region=region)
    return found


def _judged_as_a_whole(got: Tensor, eager: Arithmetic) -> Difference:
    value = exact(got)
    if value.numel() == 0:
        return Difference(0.0, 0.0, 0.0)
    if not _finite_alike(value, eager):
        return Difference(math.inf, eager.rms_bound, math.inf, NOT_FINITE, right=False)
    value = value.where(eager.settled, 0)
    error = (value - eager.truth).abs()
    root = rms(error)
    top = largest(error)
    size = rms(eager.truth)
    kind = dense(got).dtype
    distance = ulps(value.to(kind), eager.truth.to(kind)) if kind.is_floating_point else top
    is_zero = size > 0 and not bool(value.any())
    if is_zero and not eager.is_noise and bool(eager.eager.any()):
        return Difference(root, eager.mean_square, distance, "all zeros", right=False)
    if root <= eager.rms_bound and not top <= eager.largest_bound:
        return Difference(top, eager.largest_bound, distance, "the largest element", right=False)
    if root <= eager.rms_bound and not eager.is_noise:
        wrong = _biased(value, eager) or _wrong_rows(error, eager)
        if wrong is not None:
            return replace(wrong, ulps=distance)
    note = ZERO_TOO if is_zero and not eager.is_noise else _noise(size, eager)
    return Difference(root, eager.rms_bound, distance, note, right=root <= eager.rms_bound)


def _biased(value: Tensor, eager: Arithmetic) -> Difference | None:
    """A factor over a whole tensor that is no rounding, though each element is within its bound."""
    off = abs(projection(value, eager.truth) - 1)
    if off <= eager.scale_bound:
        return None
    return Difference(off, eager.scale_bound, 0.0, "its projection on the reference is not 1", right=False)


def _wrong_rows(error: Tensor, eager: Arithmetic) -> Difference | None:
    """The first group of rows whose error is beyond its own bounds."""
    for rows in eager.rows:
        own = error[rows.index]
        floor = eager.floor[rows.index]
        for found, allowed, slack in (
            (rms(own), rows.mean_square, rms(floor)),
            (largest(own), rows.largest, largest(floor)),
        ):
            if found > rows.factor * allowed + slack:
                place = int(rows.index[own.flatten(1).amax(1).argmax()])
                note = f"in row {place}, of {len(rows.index)} rows of that size"
                return Difference(found, rows.factor * allowed + slack, 0.0, note, right=False)
    return None


def _finite_alike(value: Tensor, eager: Arithmetic) -> bool:
    """Whether NaNs and infinities match eager's; where samples disagree about them, anything is accepted."""
    odd = ~eager.eager.isfinite()
    return bool((same(value, eager.eager) | ~odd).all()) and bool(value[eager.settled].isfinite().all())


def _noise(size: float, eager: Arithmetic) -> str:
    if size > eager.rms_bound or max(size, eager.mean_square) == 0:
        return eager.note
    return NOISE if eager.is_noise else HIDDEN


def quadratic_mean(values: Sequence[float]) -> float:
    """The root of the mean of squares."""
    return math.sqrt(sum(value * value for value in values) / len(values))
