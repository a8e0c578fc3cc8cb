"""ddpopt.judge.compare: what passes is what rounding can do, and nothing else."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddpopt.judge.compare import Sum, bitwise, communication, contribution, ulps

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbors_are_one_ulp_apart_and_the_two_zeros_none(dtype: torch.dtype) -> None:
    values = torch.cat([drawn(0, 100, dtype=dtype), torch.zeros(1, dtype=dtype)])
    above = torch.nextafter(values, torch.full_like(values, math.inf))
    assert ulps(values, above) == ulps(above, values) == 1.0
    assert ulps(values[-1], -values[-1]) == 0.0
    assert ulps(above[-1], -above[-1]) == 2.0


def test_far_apart_in_float64_is_far_and_nan_is_infinitely_far_from_numbers_alone() -> None:
    largest = torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64)
    assert ulps(largest, -largest) > 2.0**63
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert ulps(nan, one) == math.inf
    assert ulps(nan, nan) == 0.0


def test_bitwise_takes_equal_nans_and_zeros_of_either_sign_and_says_how_far_off_all_else_is() -> None:
    left = torch.tensor([0.0, math.nan, math.inf])
    assert bitwise(left, torch.tensor([-0.0, math.nan, math.inf])).right
    assert not bitwise(left, torch.tensor([0.0, 0.0, math.inf])).right
    found = bitwise(torch.tensor([1.0, 2.0 + 2**-22]), torch.tensor([1.0, 2.0]))
    assert (found.right, found.error, found.ulps) == (False, 2**-22, 1.0)
    assert bitwise(torch.eye(3).to_sparse(), torch.eye(3).to_sparse()).right
    assert not bitwise(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])).right


# ------------------------------------------------------------------------------------------------- L1


def mean_over_ranks(parts: list[Tensor], order: tuple[int, ...]) -> Tensor:
    total = torch.zeros_like(parts[0])
    scaled = [part * torch.tensor(1 / len(parts), dtype=part.dtype) for part in parts]
    for index in order:
        total = total + scaled[index]
    return total


def sum_over(parts: list[Tensor]) -> Sum:
    total, magnitude, terms = torch.stack([contribution(part) for part in parts]).sum(0)
    return Sum(total, magnitude, len(parts), terms)


@given(st.data(), st.integers(1, 5), st.sampled_from(DTYPES), st.sampled_from([1.0, 1e-30, 1e-40, 1e20]))
def test_sums_of_any_size_are_within_the_bound_in_every_order(
    data: st.DataObject, ranks: int, dtype: torch.dtype, scale: float
) -> None:
    seed = data.draw(st.integers(0, 2**20))
    # in half precision the scale would leave nothing but zeros or infinity
    size = scale if dtype in (torch.float32, torch.float64) else 1.0
    parts = [drawn(seed + rank, 20, dtype=dtype) * size for rank in range(ranks)]
    order = tuple(data.draw(st.permutations(range(ranks))))
    assert communication(mean_over_ranks(parts, order), sum_over(parts)).right


@pytest.mark.parametrize(
    "wrong",
    [
        lambda parts: parts[0],
        lambda parts: parts[0] + parts[1] + parts[2],
        lambda parts: torch.zeros_like(parts[0]),
        lambda parts: (parts[0] + parts[1]) / 3,
        lambda parts: torch.stack(parts).mean(0).to(torch.bfloat16).float(),
        lambda parts: torch.stack(parts).mean(0) * (1 + 2**-19),
    ],
    ids=["own", "sum", "zeros", "one lost", "half precision", "thirty-two roundings off"],
)
def test_what_is_no_mean_over_ranks_is_outside_of_the_bound(wrong: Callable[[list[Tensor]], Tensor]) -> None:
    parts = [drawn(seed, 50) for seed in range(3)]
    assert not communication(wrong(parts), sum_over(parts)).right


@pytest.mark.parametrize(("value", "right"), [(1e-45, True), (1e-30, False)])
def test_a_lost_subnormal_is_rounding_and_a_lost_small_number_is_not(value: float, right: bool) -> None:
    parts = [torch.full((3,), value)] * 2
    assert communication(torch.zeros(3), sum_over(parts)).right is right
    assert communication(torch.zeros(0), sum_over([part[:0] for part in parts])).right


def test_nan_at_the_places_of_the_mean_is_equal_and_elsewhere_wrong() -> None:
    parts = [drawn(seed, 50) for seed in range(3)]
    parts[1][7] = math.nan
    right = mean_over_ranks(parts, (2, 0, 1))
    assert communication(right, sum_over(parts)).right
    for wrong in (right.nan_to_num(), right.clone().index_fill_(0, torch.tensor([8]), math.nan)):
        found = communication(wrong, sum_over(parts))
        assert not found.right
        assert found.error == math.inf


def test_what_eager_itself_overflows_is_asked_for_in_the_same_places() -> None:
    parts = [torch.full((4,), 3e4, dtype=torch.float16)] * 3
    parts[0] = torch.tensor([3e4, 1, 1, 1], dtype=torch.float16)
    eager = torch.tensor([math.inf, 2e4, 2e4, 2e4], dtype=torch.float16)
    terms = sum_over(parts)
    assert not communication(eager, terms).right
    assert communication(eager, terms, eager=eager).right
    assert not communication(-eager, terms, eager=eager).right
    assert not communication(torch.full_like(eager, 2e4), terms, eager=eager).right


def test_a_gradient_that_is_sent_in_a_finer_dtype_is_rounded_once_more_as_it_comes_back() -> None:
    parts = [drawn(seed, 1000, dtype=torch.bfloat16) for seed in range(2)]
    back = (parts[0].half() / 2 + parts[1].half() / 2).bfloat16()
    assert communication(back, sum_over(parts), torch.float16).right
    assert not communication(back * 1.02, sum_over(parts), torch.float16).right


# ------------------------------------------------------------------------------- sparse, with repeated rows


def sparse(rows: list[int], values: Tensor, size: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, size, check_invariants=True)


def test_each_repetition_of_a_row_is_a_term_of_its_own() -> None:
    table = sparse([1, 1, 0], torch.tensor([[1.0], [-1.0], [3.0]]), (3, 1))
    assert contribution(table).flatten(1).tolist() == [[3, 0, 0], [3, 2, 0], [1, 2, 0]]
    pair = sparse([0, 0], torch.tensor([3 - 4j, 0j]), (1,))
    assert contribution(pair).flatten(1).tolist() == [[3, -4], [3, 4], [2, 2]]
    assert contribution(torch.tensor([2.0, -3.0])).tolist() == [[2, -3], [2, 3], [1, 1]]


def test_the_bound_is_that_of_the_sum_of_all_rows() -> None:
    count = 2**11
    values = drawn(0, 2 * count).abs().sort(descending=True).values
    parts = [sparse([0] * count, part, (2,)) for part in values.view(2, count)]
    mean = torch.zeros(2)
    for value in values:  # one after the other, as nobody would
        mean[0] += value / 2
    assert not communication(mean, replace(sum_over(parts), terms=torch.full((2,), 2.0))).right
    assert communication(mean, sum_over(parts)).right


def test_an_element_without_a_gradient_does_not_hide_the_one_that_is_closest_to_its_bound() -> None:
    parts = torch.tensor([[1.0, 0.0, 3.0], [2.0**-24, 0.0, 1.0]], dtype=torch.float64)
    terms = sum_over([*parts])
    difference = communication(torch.tensor([0.5, 0.0, 2.0]), terms)
    assert difference.right
    assert difference.error == 2.0**-25
    assert 0.1 < difference.error / difference.bound < 1
