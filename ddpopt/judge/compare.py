r"""The numeric levels of the ladder: how far a gradient may be from what it is compared with.

Levels, by what they judge: L0 equality, L1 a sum over ranks. L2, the arithmetic of compiled code, is in
`ddpopt.judge.judging.arithmetic`; L3, the structure, in `ddpopt.judge.judging.structure`. Everything here
is a pure function of tensors; differences are computed in float64.

Invariant: no bound is larger than what rounding can do to the values at hand, so that a gradient of zeros, or
one of another step, rank or parameter, does not pass where the true one is more than noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_FINITE = "NaN or infinite on one side only"


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


def _accumulated(roundings: Tensor, dtype: torch.dtype) -> Tensor:
    r"""Return :math:`\gamma_n = n u / (1 - n u)` of several n, in float64; infinite where n u is 1 or more.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, Lemma 3.1.
    """
    product = roundings * unit_roundoff(dtype)
    return torch.where(product < 1, product / (1 - product), float("inf"))


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
    """Return the same in float64; complex numbers as pairs, repeated rows of a sparse tensor added up."""
    return _spread(tensor, _entries(tensor)) if tensor.is_sparse else dense(tensor).double()


def contribution(gradient: Tensor) -> Tensor:
    """Return what one rank contributes to a sum, in float64.

    Args:
        gradient: of this rank. Rows of a sparse one may be repeated, and each repetition is a term.

    Returns:
        Its value, the sum of the magnitudes of its terms, and their number: of shape ``(3, *shape)``.
    """
    if gradient.is_sparse:
        entries = _entries(gradient)
        rows = (entries, entries.abs(), torch.ones_like(entries))
        return torch.stack([_spread(gradient, row) for row in rows])
    value = exact(gradient)
    return torch.stack([value, value.abs(), torch.ones_like(value)])


def _entries(sparse: Tensor) -> Tensor:
    """The values that a sparse tensor holds, in float64; those of one row apart, which coalescing adds."""
    values = sparse.detach()._values()
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).double()


def _spread(sparse: Tensor, entries: Tensor) -> Tensor:
    """Values laid out as the rows of a sparse tensor are, and added up where rows are repeated."""
    shape = (*sparse.shape, 2) if sparse.is_complex() else sparse.shape
    return torch.sparse_coo_tensor(sparse._indices(), entries, shape, check_invariants=False).to_dense()


def ulps(left: Tensor, right: Tensor) -> float:
    """Return the largest distance of two tensors, in units in the last place of the larger of two elements.

    Args:
        left: a tensor of any floating-point or complex dtype.
        right: of the same dtype and shape.

    Returns:
        That many units; infinite if one is NaN and the other is not.

    >>> one = torch.tensor([1.0])
    >>> ulps(one, torch.nextafter(one, torch.tensor([2.0]))), ulps(one, one)
    (1.0, 0.0)
    """
    a, b = dense(left), dense(right)
    info = torch.finfo(a.dtype)
    size = torch.maximum(a.double().abs(), b.double().abs()).clamp_min(info.smallest_normal)
    unit = size / torch.frexp(size).mantissa * (info.eps / 2)
    return largest(torch.where(same(a, b), 0, (a.double() - b.double()).abs() / unit))


def bitwise(got: Tensor, expected: Tensor) -> Difference:
    """L0: equal, element by element; the two zeros are equal, and so are NaNs.

    Args:
        got: of the mode under test.
        expected: of eager, of the same shape and dtype.

    Returns:
        The largest absolute difference, against a bound of 0.
    """
    a, b = dense(got), dense(expected)
    if torch.equal(a, b) or bool(same(a, b).all()):
        return Difference(0.0, 0.0, 0.0)
    distance = ulps(got, expected) if a.is_floating_point() else float("inf")
    return Difference(largest((a.double() - b.double()).abs()), 0.0, distance, right=False)


@dataclass(frozen=True)
class Sum:
    """What ranks contribute to a gradient, in float64.

    Attributes:
        total: the sum over ranks of their local gradients.
        magnitude: the sum of the absolute values of all terms.
        ranks: how many there are.
        terms: how many terms each element has: one of each rank; of a sparse gradient, one for each time that
            a row is held.
    """

    total: Tensor
    magnitude: Tensor
    ranks: int
    terms: Tensor


def communication_bound(terms: Sum, own: torch.dtype, sent_as: torch.dtype | None = None) -> Tensor:
    r"""L1: what rounding can do at most to the mean over ranks, element by element.

    The mean of N local gradients is sent as a sum of :math:`g_k / N`, where each rank has one term of a dense
    gradient, and as many of a sparse one as it holds rows. In a dtype with unit roundoff u each term is
    rounded twice (1 / N, and the product with it; a conversion into the dtype that is sent counts once more),
    and every order of adding K terms rounds each of them at most K - 1 times. Hence

    .. math:: |\hat g - g| \le \gamma_{K+1+c} \sum_k |g_k| / N + (K + 1) \eta

    with :math:`\gamma_n = n u / (1 - n u)`, c the conversions, and :math:`\eta` the smallest subnormal
    number, for what underflows. To this comes the rounding of the float64 sum that it is compared with.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, section 4.2
    (every order of summation), with Lemmas 3.1 and 3.3 for the products.

    Args:
        terms: what the ranks contribute.
        own: dtype of the gradient, in which the sum is computed if it is not sent in another one.
        sent_as: that other one. Then c is 2: into it, and back.

    Returns:
        One bound for each element.
    """
    dtype, casts = (own, 0) if sent_as is None else (sent_as, 2)
    info = torch.finfo(dtype)
    relative = _accumulated(terms.terms + 1 + casts, dtype) + _accumulated(terms.terms + 1, torch.float64)
    # no magnitude times an infinite factor is no number
    rounding = torch.where(terms.magnitude == 0, 0, terms.magnitude * relative) / terms.ranks
    return rounding + (terms.terms + 1) * info.smallest_normal * info.eps


def communication(
    got: Tensor,
    terms: Sum,
    sent_as: torch.dtype | None = None,
    eager: Tensor | None = None,
) -> Difference:
    """L1: a reduced gradient against the mean of the local ones, within `communication_bound`.

    Where the mean or eager's own gradient is NaN or infinite there is nothing to bound: the gradient must be
    the same there.

    Args:
        got: the reduced gradient.
        terms: what the ranks contribute, of the same shape (pairs for complex numbers).
        sent_as: in which dtype it was sent; by default its own. From another one it is converted back, which
            rounds once more, by the unit roundoff of its own.
        eager: eager's own reduced gradient, where it is known.

    Returns:
        The error of the element that exceeds its bound most, or comes closest to it, and its distance in ULP.
    """
    value, mean = exact(got), terms.total / terms.ranks
    if value.numel() == 0:
        return Difference(0.0, 0.0, 0.0)
    own = dense(got).dtype
    bound = communication_bound(terms, own, sent_as)
    if sent_as not in (None, own):  # one more conversion: u of the number, or a subnormal
        info = torch.finfo(own)
        bound = bound + (mean.abs() + bound) * unit_roundoff(own) + info.smallest_normal * info.eps
    expected = mean if eager is None else exact(eager)
    finite = expected.isfinite() & mean.isfinite()
    unlike = torch.where(finite, ~value.isfinite(), ~same(value, expected))
    error = torch.where(finite, (value - mean).abs(), 0).masked_fill(unlike, float("inf"))
    bound = torch.where(finite, bound, 0)
    share = torch.where(error > 0, error / bound, 0).flatten()  # bounds differ in size
    worst = int(share.argmax())
    narrow = dense(got)
    return Difference(
        error=float(error.flatten()[worst]),
        bound=float(bound.flatten()[worst]),
        ulps=ulps(narrow.flatten()[worst], expected.flatten()[worst].to(narrow.dtype)),
        note=NOT_FINITE if unlike.any() else "",
        right=bool((error <= bound).all()) and not unlike.any(),
    )


def same(left: Tensor, right: Tensor) -> Tensor:
    """Tell element by element whether two are equal; NaNs are."""
    return (left == right) | (left.isnan() & right.isnan())


def rms(tensor: Tensor) -> float:
    """Return the root mean square; 0 of nothing."""
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def largest(magnitudes: Tensor) -> float:
    """Return the largest of some magnitudes; infinite if one is NaN, 0 of nothing."""
    return float(magnitudes.nan_to_num(nan=float("inf")).max()) if magnitudes.numel() else 0.0
