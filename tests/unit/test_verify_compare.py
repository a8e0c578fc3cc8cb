"""ddpopt.verify.compare: what passes is what rounding can do, and nothing else."""

import math
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddpopt.verify.compare import (
    Sum,
    accumulated,
    arithmetic,
    arithmetic_of,
    bitwise,
    communication,
    communication_bound,
    tail_factor,
    ulps,
    unit_roundoff,
)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_ulp_apart(dtype: torch.dtype) -> None:
    values = drawn(0, 100, dtype=dtype)
    above = torch.nextafter(values, torch.full_like(values, math.inf))
    assert ulps(values, above) == 1.0
    assert ulps(above, values) == 1.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_zeros_are_no_ulp_apart_and_the_smallest_numbers_two(dtype: torch.dtype) -> None:
    zero = torch.zeros((), dtype=dtype)
    small = torch.nextafter(zero, torch.ones((), dtype=dtype))
    assert ulps(zero, -zero) == 0.0
    assert ulps(small, -small) == 2.0


def test_far_apart_in_float64_is_far() -> None:
    largest = torch.tensor(torch.finfo(torch.float64).max, dtype=torch.float64)
    assert ulps(largest, -largest) > 2.0**63


def test_nan_against_a_number_is_infinitely_far_and_against_nan_not() -> None:
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert ulps(nan, one) == math.inf
    assert ulps(nan, nan) == 0.0


def test_bitwise_takes_equal_nans_and_zeros_of_either_sign() -> None:
    left = torch.tensor([0.0, math.nan, math.inf])
    assert bitwise(left, torch.tensor([-0.0, math.nan, math.inf])).right
    assert not bitwise(left, torch.tensor([0.0, 0.0, math.inf])).right


def test_bitwise_says_how_far_off_one_ulp_is() -> None:
    one = torch.tensor([1.0, 2.0])
    moved = torch.tensor([1.0, 2.0 + 2**-22])
    assert (bitwise(moved, one).error, bitwise(moved, one).ulps) == (2**-22, 1.0)


def test_sparse_and_complex_gradients_are_compared_too() -> None:
    sparse = torch.eye(3).to_sparse()
    assert bitwise(sparse, torch.eye(3).to_sparse()).right
    assert not bitwise(torch.tensor([1 + 1j]), torch.tensor([1 + 2j])).right


def test_gamma_is_highams() -> None:
    u = unit_roundoff(torch.float32)
    assert accumulated(3, torch.float32) == 3 * u / (1 - 3 * u)
    assert accumulated(2**9, torch.bfloat16) == math.inf


# ------------------------------------------------------------------------------------------------- L1


def mean_over_ranks(parts: list[Tensor], order: tuple[int, ...]) -> Tensor:
    total = torch.zeros_like(parts[0])
    scaled = [part * torch.tensor(1 / len(parts), dtype=part.dtype) for part in parts]
    for index in order:
        total = total + scaled[index]
    return total


def sum_of(parts: list[Tensor]) -> Sum:
    wide = [part.double() for part in parts]
    return Sum(torch.stack(wide).sum(0), torch.stack(wide).abs().sum(0), len(parts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_order_of_summation_is_within_the_bound(dtype: torch.dtype, ranks: int) -> None:
    parts = [drawn(seed, 50, dtype=dtype) for seed in range(ranks)]
    for order in permutations(range(ranks)):
        assert communication(mean_over_ranks(parts, order), sum_of(parts)).right


@given(st.integers(1, 6), st.integers(0, 2**20), st.sampled_from([1.0, 1e-30, 1e-40, 1e20]))
def test_sums_of_any_size_are_within_the_bound(ranks: int, seed: int, scale: float) -> None:
    parts = [drawn(seed + rank, 20) * scale for rank in range(ranks)]
    assert communication(mean_over_ranks(parts, tuple(range(ranks))), sum_of(parts)).right


def test_the_bound_is_a_few_roundings_of_the_magnitudes() -> None:
    parts = [drawn(seed, 50) for seed in range(3)]
    terms = sum_of(parts)
    assert bool((communication_bound(terms, torch.float32) < 5 * 2**-24 * terms.magnitude / 3).all())


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
    assert not communication(wrong(parts), sum_of(parts)).right


def test_a_lost_subnormal_is_rounding_and_a_lost_small_number_is_not() -> None:
    tiny = [torch.full((3,), 1e-45), torch.full((3,), 1e-45)]
    small = [torch.full((3,), 1e-30), torch.full((3,), 1e-30)]
    zeros = torch.zeros(3)
    assert communication(zeros, sum_of(tiny)).right
    assert not communication(zeros, sum_of(small)).right


# ------------------------------------------------------------------------------------------------- L2


def samples_of(truth: Tensor, noise: float, count: int = 8) -> list[Tensor]:
    return [(truth + noise * drawn(seed + 1, *truth.shape).double()).float() for seed in range(count)]


def test_the_factor_is_students_quantile() -> None:
    # tables: t of one degree of freedom at 0.975 is 12.706, of ten at 0.995 is 3.169
    assert tail_factor(1, 0.05) == pytest.approx(12.706, abs=1e-3)
    assert tail_factor(10, 0.01) == pytest.approx(3.169, abs=1e-3)


def test_one_more_sample_of_the_same_kind_passes() -> None:
    truth = drawn(0, 200).double()
    known = arithmetic_of(samples_of(truth, 1e-7), truth)
    for seed in range(50, 80):
        assert arithmetic((truth + 1e-7 * drawn(seed, 200).double()).float(), known).right


def test_a_hundred_times_the_noise_does_not_pass() -> None:
    truth = drawn(0, 200).double()
    known = arithmetic_of(samples_of(truth, 1e-7), truth)
    assert not arithmetic((truth + 1e-5 * drawn(9, 200).double()).float(), known).right


def test_zeros_never_pass_where_the_truth_is_tiny_but_no_noise() -> None:
    truth = 1e-6 * drawn(0, 200).double()
    known = arithmetic_of(samples_of(truth, 1e-13), truth)
    assert not arithmetic(torch.zeros(200), known).right


def test_zeros_do_not_pass_where_the_truth_is_just_above_the_noise() -> None:
    truth = drawn(0, 200).double()
    known = arithmetic_of(samples_of(truth, 0.5), truth)
    found = arithmetic(torch.zeros(200), known)
    assert not found.right
    assert found.note == "all zeros"


def test_a_gradient_that_is_zero_in_theory_never_fails() -> None:
    truth = 1e-17 * drawn(0, 64).double()
    known = arithmetic_of(samples_of(truth, 1e-8), truth)
    noise = arithmetic((3e-8 * drawn(99, 64).double()).float(), known)
    assert noise.right
    assert noise.note == "nothing but noise"
    assert arithmetic(torch.zeros(64), known).right


def test_one_wrong_element_among_many_is_seen() -> None:
    truth = drawn(0, 100_000).double()
    known = arithmetic_of(samples_of(truth, 1e-7), truth)
    got = truth.float()
    got[77] = 0
    assert not arithmetic(got, known).right


def test_nan_does_not_pass() -> None:
    truth = drawn(0, 10).double()
    known = arithmetic_of(samples_of(truth, 1e-7), truth)
    got = truth.float()
    got[0] = math.nan
    assert not arithmetic(got, known).right


def test_a_float64_run_that_took_another_path_is_not_believed() -> None:
    truth = drawn(0, 100).double()
    known = arithmetic_of(samples_of(truth, 1e-7), truth * drawn(1, 100).sign().double())
    assert known.note == "float64 takes another path through this model"
    assert arithmetic(truth.float(), known).right
    assert not arithmetic(truth.float() * 1.001, known).right


def test_without_a_float64_run_the_mean_of_the_samples_is_the_truth() -> None:
    truth = drawn(0, 100).double()
    known = arithmetic_of(samples_of(truth, 1e-7), None)
    assert known.note == "no float64 reference"
    assert arithmetic(truth.float(), known).right
    assert not arithmetic(truth.float() * 1.001, known).right


def test_an_exact_gradient_may_be_off_by_its_own_rounding_alone() -> None:
    truth = torch.ones(10, dtype=torch.float64)
    known = arithmetic_of([torch.ones(10)] * 8, truth)
    assert arithmetic(torch.nextafter(torch.ones(10), torch.zeros(10)), known).right
    assert not arithmetic(torch.full((10,), 1 + 2**-20), known).right


def test_empty_gradients_pass() -> None:
    known = arithmetic_of([torch.zeros(0)], torch.zeros(0))
    assert arithmetic(torch.zeros(0), known).right
    assert communication(torch.zeros(0), Sum(torch.zeros(0), torch.zeros(0), 2)).right
