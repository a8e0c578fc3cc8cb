r"""The numeric levels of the ladder: how far a gradient may be from its reference.

L0 judges equality, L1 a sum over ranks. L2, the arithmetic of compiled code, is in
`ddpopt.judge.rules.arithmetic`; L3, the structure, in `ddpopt.judge.rules.structure`. Everything here
is a pure function of tensors; differences are computed in float64.

Invariant: no bound exceeds the error that rounding can cause in the given values, so a gradient of zeros, or
of another step, rank or parameter, does not pass unless the true gradient is noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_FINITE = "NaN or infinite on one side only"


@dataclass(frozen=True)
class Region:
    """Which elements of a tensor are outside of their bound.

    Attributes:
        count: how many.
        of: how many elements the tensor has.
        first: their smallest index in each dimension.
        last: their largest.
        worst: the index of the one that is farthest outside.
        got: its value.
        expected: what it should be.
    """

    count: int
    of: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    worst: tuple[int, ...]
    got: float
    expected: float

    @property
    def indices(self) -> str:
        """The smallest box that holds all of them, as an index.

        >>> Region(2, 36, (0, 1), (0, 4), (0, 1), 0.0, 0.25).indices
        '[0, 1:5]'
        """
        spans = zip(self.first, self.last, strict=True)
        return f"[{', '.join(str(one) if one == end else f'{one}:{end + 1}' for one, end in spans)}]"

    def __str__(self) -> str:
        many = f"{self.count} of {self.of} elements, in {self.indices}"
        return f"{many}; at {[*self.worst]} {self.got:.6g} instead of {self.expected:.6g}"


def region_of(wrong: Tensor, error: Tensor, got: Tensor, expected: Tensor) -> Region | None:
    """Describe the elements that are wrong.

    Args:
        wrong: where they are.
        error: how far each element is off; the largest one where something is wrong is shown.
        got: the values.
        expected: what they should be.

    Returns:
        The region; None if nothing is wrong.
    """
    if not bool(wrong.any()):
        return None
    index = wrong.nonzero()
    off = error.double().nan_to_num(nan=float("inf")).where(wrong, -1.0).flatten()
    place = int(off.argmax())
    worst = [int(each) for each in torch.unravel_index(off.argmax(), wrong.shape)]
    return Region(
        count=len(index),
        of=wrong.numel(),
        first=tuple(index.amin(0).tolist()),
        last=tuple(index.amax(0).tolist()),
        worst=tuple(worst),
        got=float(got.flatten()[place]),
        expected=float(expected.flatten()[place]),
    )


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from its reference.

    Attributes:
        error: the error, in the tensor's unit.
        bound: the largest allowed error, in the same unit.
        ulps: largest distance in units in the last place of the tensor's dtype.
        note: a remark on this comparison for the reader; may be empty.
        right: whether the tensor passes.
        region: which elements are outside; None if it passes, or if only the tensor as a whole does not.
    """

    error: float
    bound: float
    ulps: float
    note: str = ""
    right: bool = True
    region: Region | None = None


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
    """Convert a tensor for elementwise functions: dense, real, detached."""
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
    """Return a tensor in float64; complex numbers as pairs, repeated rows of a sparse tensor added up."""
    return _spread(tensor, _entries(tensor)) if tensor.is_sparse else dense(tensor).double()


def contribution(gradient: Tensor) -> Tensor:
    """Return one rank's contribution to a sum, in float64.

    Args:
        gradient: the gradient of this rank. Rows of a sparse gradient may be repeated; each repetition is a
            term.

    Returns:
        Its value, the sum of the magnitudes of its terms, and their number, with shape ``(3, *shape)``.
    """
    if gradient.is_sparse:
        entries = _entries(gradient)
        rows = (entries, entries.abs(), torch.ones_like(entries))
        return torch.stack([_spread(gradient, row) for row in rows])
    value = exact(gradient)
    return torch.stack([value, value.abs(), torch.ones_like(value)])


def _entries(sparse: Tensor) -> Tensor:
    """The values of a sparse tensor in float64, without adding repeated rows as coalescing does."""
    values = sparse.detach()._values()
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).double()


def _spread(sparse: Tensor, entries: Tensor) -> Tensor:
    """Values laid out like the rows of a sparse tensor, with repeated rows added up."""
    shape = (*sparse.shape, 2) if sparse.is_complex() else sparse.shape
    return torch.sparse_coo_tensor(sparse._indices(), entries, shape, check_invariants=False).to_dense()


def ulps(left: Tensor, right: Tensor) -> float:
    """Return the largest distance between two tensors, in units in the last place of the larger element.

    Args:
        left: a tensor of any floating-point or complex dtype.
        right: a tensor of the same dtype and shape.

    Returns:
        The distance; infinite if one element is NaN and the other is not.

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
    """L0: compare element by element; the two zeros are equal, and so are NaNs.

    Args:
        got: the tensor of the mode under test.
        expected: the tensor of eager, of the same shape and dtype.

    Returns:
        The largest absolute difference, against a bound of 0.
    """
    a, b = dense(got), dense(expected)
    if torch.equal(a, b) or bool(same(a, b).all()):
        return Difference(0.0, 0.0, 0.0)
    distance = ulps(got, expected) if a.is_floating_point() else float("inf")
    error = (a.double() - b.double()).abs()
    region = region_of(~same(a, b), error, a, b)
    return Difference(largest(error), 0.0, distance, right=False, region=region)


@dataclass(frozen=True)
class Sum:
    """The contributions of all ranks to a gradient, in float64.

    Attributes:
        total: the sum of the ranks' local gradients.
        magnitude: the sum of the absolute values of all terms.
        ranks: the number of ranks.
        terms: the number of terms of each element: one per rank; for a sparse gradient, one per occurrence of
            a row.
    """

    total: Tensor
    magnitude: Tensor
    ranks: int
    terms: Tensor


def communication_bound(terms: Sum, own: torch.dtype, sent_as: torch.dtype | None = None) -> Tensor:
    r"""L1: the largest rounding error of the mean over ranks, element by element.

    The mean of N local gradients is sent as a sum of :math:`g_k / N`, where each rank has one term of a dense
    gradient, and one term for each row of a sparse one. In a dtype with unit roundoff u each term is rounded
    twice (1 / N, and the product with it; a conversion into the dtype that is sent adds one more), and any
    order of adding K terms rounds each of them at most K - 1 times. Hence

    .. math:: |\hat g - g| \le \gamma_{K+1+c} \sum_k |g_k| / N + (K + 1) \eta

    with :math:`\gamma_n = n u / (1 - n u)`, c the number of conversions, and :math:`\eta` the smallest
    subnormal number, for underflow. The rounding of the float64 reference sum is added.

    Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, SIAM 2002, section 4.2
    (every order of summation), with Lemmas 3.1 and 3.3 for the products.

    Args:
        terms: the contributions of the ranks.
        own: dtype of the gradient, in which the sum is computed unless it is sent in another dtype.
        sent_as: that other dtype. Then c is 2: one conversion each way.

    Returns:
        One bound for each element.
    """
    dtype, casts = (own, 0) if sent_as is None else (sent_as, 2)
    info = torch.finfo(dtype)
    relative = _accumulated(terms.terms + 1 + casts, dtype) + _accumulated(terms.terms + 1, torch.float64)
    # a magnitude of zero times an infinite factor would be NaN
    rounding = torch.where(terms.magnitude == 0, 0, terms.magnitude * relative) / terms.ranks
    return rounding + (terms.terms + 1) * info.smallest_normal * info.eps


def communication(
    got: Tensor, terms: Sum, sent_as: torch.dtype | None = None, eager: Tensor | None = None
) -> Difference:
    """L1: compare a reduced gradient with the mean of the local ones, within `communication_bound`.

    Where the mean or eager's own gradient is NaN or infinite, no bound applies: the gradient must be equal
    there.

    Args:
        got: the reduced gradient.
        terms: the contributions of the ranks, of the same shape (pairs for complex numbers).
        sent_as: the dtype in which it was sent; by default its own. Converting back from another dtype rounds
            once more, by the unit roundoff of the gradient's own dtype.
        eager: eager's own reduced gradient, if known.

    Returns:
        The error of the element that exceeds its bound most, or comes closest to it, and its distance in ULP.
    """
    value = exact(got)
    mean = terms.total / terms.ranks
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
    outside = (error > bound) | unlike
    return Difference(
        error=float(error.flatten()[worst]),
        bound=float(bound.flatten()[worst]),
        ulps=ulps(narrow.flatten()[worst], expected.flatten()[worst].to(narrow.dtype)),
        note=NOT_FINITE if unlike.any() else "",
        right=not bool(outside.any()),
        region=region_of(outside, error, value, expected),
    )


def same(left: Tensor, right: Tensor) -> Tensor:
    """Return element by element whether two tensors are equal; NaNs are equal."""
    return (left == right) | (left.isnan() & right.isnan())


def rms(tensor: Tensor) -> float:
    """Return the root mean square; 0 for an empty tensor."""
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def largest(magnitudes: Tensor) -> float:
    """Return the largest magnitude; infinite if one is NaN, 0 for an empty tensor."""
    return float(magnitudes.nan_to_num(nan=float("inf")).max()) if magnitudes.numel() else 0.0
