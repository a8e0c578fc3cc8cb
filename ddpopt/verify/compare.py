r"""The numeric levels of the ladder: how far a gradient may be from what it is compared with.

Levels, by what they judge: L0 equality, L1 a sum over ranks, L2 the arithmetic of compiled code. (L3, the
structure, is in `ddpopt.verify.structure`.) Everything here is a pure function of tensors; differences are
computed in float64.

Invariant: no bound is larger than what rounding can do to the values at hand, so that a gradient of zeros, or
one of another step, rank or parameter, does not pass where the true one is more than noise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath
import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""Chance that a right gradient is called wrong at L2, if it has a single element and normal errors."""
CREDIBLE = 10.0
"""A float64 reference that is this many times further from eager than eager's own spread ran another way."""


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from what it is compared with.

    Attributes:
        error: in the tensor's unit.
        bound: what the error may be at most, in the same unit.
        ulps: largest distance in units in the last place of the tensor's dtype.
        note: what a reader should know of this comparison; empty if nothing.
        right: whether the tensor passes.
    """

    error: float
    bound: float
    ulps: float
    note: str = ""
    right: bool = True


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest: half of the distance from 1 to the next number.

    >>> unit_roundoff(torch.float32) == 2**-24
    True
    """
    return torch.finfo(dtype).eps / 2


def accumulated(roundings: int, dtype: torch.dtype) -> float:
    r"""Return :math:`\gamma_n = n u / (1 - n u)`, the relative error of n roundings in a row.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, Lemma 3.1.

    Args:
        roundings: n.
        dtype: whose unit roundoff u is meant.

    Returns:
        A number without unit; infinite where n u is 1 or more.
    """
    product = roundings * unit_roundoff(dtype)
    return product / (1 - product) if product < 1 else float("inf")


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor as one that elementwise functions take: dense, real, without history."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bits of a tensor, in the order of its elements."""
    # a plain .contiguous() leaves an expanded tensor of one element with a stride of 0
    data = dense(tensor).cpu().clone(memory_format=torch.contiguous_format).flatten()
    return bytes(data.view(torch.uint8).numpy().tobytes()) if data.numel() else b""


def exact(tensor: Tensor) -> Tensor:
    """Return the same in float64; complex numbers as pairs."""
    return dense(tensor).double()


def ulps(left: Tensor, right: Tensor) -> float:
    """Return the largest distance of two tensors, in units in the last place.

    Args:
        left: a tensor of any floating-point or complex dtype.
        right: of the same dtype and shape.

    Returns:
        How many representable numbers lie between two elements at most, counting one of the two; infinite if
        one is NaN and the other is not.

    >>> one = torch.tensor([1.0])
    >>> ulps(one, torch.nextafter(one, torch.tensor([2.0]))), ulps(one, one)
    (1.0, 0.0)
    """
    if left.numel() == 0:
        return 0.0
    a, b = dense(left), dense(right)
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    left_ranks, right_ranks = _ordered(a), _ordered(b)
    # of opposite signs the distance may not fit into 64 bits
    apart = (left_ranks < 0) != (right_ranks < 0)
    wide = left_ranks.double().abs() + right_ranks.double().abs()
    gap = torch.where(apart, wide, torch.where(apart, 0, left_ranks - right_ranks).abs().double())
    return float(gap.masked_fill(a.isnan(), 0).max())


def _ordered(tensor: Tensor) -> Tensor:
    """Integers in the order of the floating-point numbers, neighbours one apart, both zeros at 0."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    bits = tensor.contiguous().view(integers)
    magnitude = (bits & torch.iinfo(integers).max).long()
    return torch.where(bits < 0, -magnitude, magnitude)


def bitwise(got: Tensor, expected: Tensor) -> Difference:
    """L0: equal, element by element; the two zeros are equal, and so are NaNs.

    Args:
        got: of the mode under test.
        expected: of eager, of the same shape and dtype.

    Returns:
        The largest absolute difference, against a bound of 0.
    """
    a, b = dense(got), dense(expected)
    if bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return Difference(0.0, 0.0, 0.0)
    return Difference(_largest((a.double() - b.double()).abs()), 0.0, ulps(got, expected), right=False)


@dataclass(frozen=True)
class Sum:
    """What ranks contribute to a gradient, in float64.

    Attributes:
        total: the sum over ranks of their local gradients.
        magnitude: the sum of their absolute values.
        ranks: how many there are.
    """

    total: Tensor
    magnitude: Tensor
    ranks: int


def communication_bound(terms: Sum, dtype: torch.dtype, casts: int = 0) -> Tensor:
    r"""L1: what rounding can do at most to the mean over ranks, element by element.

    The mean of N local gradients :math:`g_r` is sent as a sum of :math:`g_r / N`. In a dtype with unit
    roundoff u each term is rounded twice (1 / N, and the product with it; a conversion into the dtype that is
    sent counts once more), and every order of adding N terms rounds each of them at most N - 1 times. Hence

    .. math:: |\hat g - g| \le \gamma_{N+1+c} \sum_r |g_r| / N + (N + 1) \eta

    with :math:`\gamma_n = n u / (1 - n u)`, c the conversions, and :math:`\eta` the smallest subnormal
    number, for what underflows. To this comes the rounding of the float64 sum that it is compared with.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, section 4.2
    (every order of summation), with Lemmas 3.1 and 3.3 for the products.

    Args:
        terms: what the ranks contribute.
        dtype: in which the sum is computed.
        casts: c.

    Returns:
        One bound for each element.
    """
    count = terms.ranks
    info = torch.finfo(dtype)
    relative = accumulated(count + 1 + casts, dtype) + accumulated(count + 1, torch.float64)
    return terms.magnitude * (relative / count) + (count + 1) * info.smallest_normal * info.eps


def communication(got: Tensor, terms: Sum, dtype: torch.dtype | None = None, casts: int = 0) -> Difference:
    """L1: a reduced gradient against the mean of the local ones, within `communication_bound`.

    Args:
        got: the reduced gradient.
        terms: what the ranks contribute, of the same shape (pairs for complex numbers).
        dtype: in which it was sent; by default its own.
        casts: conversions on the way.

    Returns:
        The error of the element that exceeds its bound most, or comes closest to it, and its distance in ULP.
    """
    value = exact(got)
    bound = communication_bound(terms, dtype or dense(got).dtype, casts)
    mean = terms.total / terms.ranks
    error = (value - mean).abs()
    if error.numel() == 0:
        return Difference(0.0, 0.0, 0.0)
    excess = (error - bound).nan_to_num(nan=float("inf")).flatten()
    worst = int(excess.argmax())
    narrow = dense(got)
    return Difference(
        error=float(error.flatten()[worst]),
        bound=float(bound.flatten()[worst]),
        ulps=ulps(narrow.flatten()[worst], mean.flatten()[worst].to(narrow.dtype)),
        right=not bool(excess[worst] > 0),
    )


@functools.cache
def tail_factor(samples: int, chance: float = FALSE_ALARM) -> float:
    r"""How many times their root mean square one more error of the same kind may be, except by chance.

    For n errors drawn from a normal distribution around zero, the ratio of one more error to their root mean
    square follows Student's t distribution with n degrees of freedom. This is its two-sided quantile. An
    error that is the norm of many elements varies less, so for it the chance is smaller still.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).

    Args:
        samples: n.
        chance: of exceeding it.

    Returns:
        The factor.

    >>> round(tail_factor(8), 1)
    13.3
    """

    def exceeded(log_t: mpmath.mpf) -> mpmath.mpf:
        x = samples / (samples + mpmath.exp(2 * log_t))
        return mpmath.log(mpmath.betainc(samples / 2, 0.5, 0, x, regularized=True) / chance)

    return math.exp(mpmath.findroot(exceeded, (0, 20), solver="anderson"))


@dataclass(frozen=True)
class Arithmetic:
    """What the rounding of one gradient looks like in eager, in float64.

    Attributes:
        truth: the gradient without rounding.
        mean_square: root mean square over the samples of the root mean square of their errors.
        largest: root mean square over the samples of their largest error.
        samples: how many there are.
        eager_is_zero: whether eager's own gradient is all zeros.
        note: how the truth was found, if not in float64.
    """

    truth: Tensor
    mean_square: float
    largest: float
    samples: int
    eager_is_zero: bool
    note: str = ""


def arithmetic_of(samples: Sequence[Tensor], reference: Tensor | None) -> Arithmetic:
    """L2: learn how far eager's rounding goes, from eager runs on data perturbed by one rounding each.

    Storing the data already costs each of its numbers a relative error of up to one unit roundoff; so what an
    eager step makes of data perturbed by that much is as right as eager itself. The errors of these steps are
    samples of what rounding does to this gradient in this model.

    Args:
        samples: gradients of the eager step, the unperturbed one first, then perturbed ones.
        reference: the gradient of the same step in float64; None if the model cannot run in it.

    Returns:
        The truth and the size of eager's errors. Where there is no reference, or the reference ran another
        way (another dropout mask, a branch not taken), the samples' mean takes its place.
    """
    values = [exact(sample) for sample in samples]
    centre = torch.stack(values).mean(0)
    spread = _norm([_rms(value - centre) for value in values])
    note = "no float64 reference"
    truth = centre
    if reference is not None:
        truth = exact(reference)
        distance = _rms(values[0] - truth)
        note = ""
        floor = unit_roundoff(dense(samples[0]).dtype) * _rms(truth)
        if not distance <= CREDIBLE * tail_factor(len(values)) * max(spread, floor):
            truth, note = centre, "float64 takes another path through this model"
    return Arithmetic(
        truth=truth,
        mean_square=_norm([_rms(value - truth) for value in values]),
        largest=_norm([_largest((value - truth).abs()) for value in values]),
        samples=len(values),
        eager_is_zero=not bool(values[0].any()),
        note=note,
    )


def arithmetic(got: Tensor, eager: Arithmetic) -> Difference:
    """L2: a compiled gradient, whose error may be as large as one of eager's, but for chance.

    Its root mean square and its largest element are each held to eager's own times `tail_factor`. The floor
    is the rounding of the result itself. All zeros pass only where the truth is no larger than noise.

    Args:
        got: the gradient of compiled code, of the shape of the truth (complex numbers as they are).
        eager: what eager's rounding looks like.

    Returns:
        The root mean square of the error, and its bound; the largest element's where that one is exceeded.
    """
    value = exact(got)
    if value.numel() == 0:
        return Difference(0.0, 0.0, 0.0)
    dtype = dense(got).dtype
    floor = 2 * unit_roundoff(dtype)
    factor = tail_factor(eager.samples)
    error = (value - eager.truth).abs()
    root, top = _rms(error), _largest(error)
    root_bound = factor * eager.mean_square + floor * _rms(eager.truth)
    top_bound = factor * eager.largest + floor * _largest(eager.truth.abs())
    distance = ulps(dense(got), eager.truth.to(dtype))
    if not value.any() and not eager.eager_is_zero and _rms(eager.truth) > eager.mean_square:
        return Difference(root, eager.mean_square, distance, "all zeros", right=False)
    if root <= root_bound and not top <= top_bound:
        return Difference(top, top_bound, distance, "the largest element", right=False)
    noise = "nothing but noise" if _rms(eager.truth) <= eager.mean_square else eager.note
    return Difference(root, root_bound, distance, noise, right=root <= root_bound)


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _largest(magnitudes: Tensor) -> float:
    if magnitudes.numel() == 0:
        return 0.0
    return float(magnitudes.nan_to_num(nan=float("inf")).max())


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
