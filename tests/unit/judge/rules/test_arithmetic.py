"""ddpopt.judge.rules.arithmetic: a compiled number may be as wrong as eager's own, and zeros are none."""

import math

import pytest
import torch
from torch import Tensor

from ddpopt.judge.compare import NOT_FINITE, Sum
from ddpopt.judge.rules.arithmetic import (
    HIDDEN,
    NOISE,
    ZERO_TOO,
    arithmetic,
    arithmetic_of,
    projection,
)
from ddpopt.judge.rules.factors import centered_factor, tail_factor


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples_of(truth: Tensor, noise: float) -> list[Tensor]:
    return [(truth + noise * drawn(seed + 1, *truth.shape).double()).float() for seed in range(8)]


TRUTH = drawn(0, 200).double()
NOISE_OF_EAGER = 1e-7
SAMPLES = samples_of(TRUTH, NOISE_OF_EAGER)


def test_the_factors_are_students_quantile_and_around_a_mean_that_of_a_prediction_interval() -> None:
    # tables: t of 1 degree of freedom at 0.975 is 12.706, of 10 at 0.995 is 3.169, of 7 at 0.975 is 2.365
    assert tail_factor(1, 0.05) == pytest.approx(12.706, abs=1e-3)
    assert tail_factor(10, 0.01) == pytest.approx(3.169, abs=1e-3)
    assert centered_factor(8, 0.05) == pytest.approx(2.365 * math.sqrt(9 / 7), abs=1e-3)
    assert centered_factor(1) == math.inf


def test_one_more_sample_of_the_same_kind_passes_and_a_hundred_times_the_noise_does_not() -> None:
    known = arithmetic_of(SAMPLES, TRUTH)
    for seed in range(50, 80):
        assert arithmetic((TRUTH + NOISE_OF_EAGER * drawn(seed, 200).double()).float(), known).right
    assert not arithmetic((TRUTH + 100 * NOISE_OF_EAGER * drawn(9, 200).double()).float(), known).right


@pytest.mark.parametrize("value", [0, math.nan])
def test_one_wrong_element_among_many_is_seen(value: float) -> None:
    truth = drawn(0, 100_000).double()
    known = arithmetic_of(samples_of(truth, 1e-7), truth)
    got = truth.float()
    got[77] = value
    assert not arithmetic(got, known).right


@pytest.mark.parametrize(
    ("size", "noise"),
    [
        pytest.param(1e-6, 1e-13, id="the truth is tiny but no noise"),
        pytest.param(1.0, 0.5, id="the truth is just above the noise"),
    ],
)
def test_zeros_do_not_pass(size: float, noise: float) -> None:
    truth = size * drawn(0, 200).double()
    found = arithmetic(torch.zeros(200), arithmetic_of(samples_of(truth, noise), truth))
    assert (found.right, found.note) == (False, "all zeros")


def test_a_gradient_that_is_zero_in_theory_never_fails() -> None:
    truth = 1e-17 * drawn(0, 64).double()
    known = arithmetic_of(samples_of(truth, 1e-8), truth)
    noise = arithmetic((3e-8 * drawn(99, 64).double()).float(), known)
    assert (noise.right, noise.note) == (True, NOISE)
    assert arithmetic(torch.zeros(64), known).right


@pytest.mark.parametrize(
    ("another_path", "note"),
    [(True, "float64 takes a different path through this model"), (False, "no float64 reference")],
)
def test_without_float64_to_believe_the_samples_mean_is_the_truth(another_path: bool, note: str) -> None:
    known = arithmetic_of(SAMPLES, TRUTH * drawn(1, 200).sign().double() if another_path else None)
    assert known.note == note
    assert arithmetic(TRUTH.float(), known).right
    assert not arithmetic(TRUTH.float() * 1.001, known).right


@pytest.mark.parametrize("size", [5.0, 7.0, 8.0])
def test_where_tanh_is_almost_1_its_derivative_is_a_rounding_error_that_all_samples_share(
    size: float,
) -> None:
    x = size + drawn(0, 400) / 4
    moved = [x * (1 + sign * 2**-24) for sign in (0, 1, -1, 1, -1, 1, -1, 1)]
    samples = [1 - each.tanh().square() for each in moved]
    truth = 1 - x.double().tanh().square()
    small = torch.exp(-2 * x)  # another formula for tanh, as right as the first
    other = 1 - ((1 - small) / (1 + small)).square()
    known = arithmetic_of(samples, truth, same_path=True)
    assert arithmetic(other, known).right
    assert known.is_noise or not arithmetic(torch.zeros(400), known).right


def test_an_exact_gradient_may_be_off_by_its_own_rounding_alone() -> None:
    truth = torch.ones(10, dtype=torch.float64)
    known = arithmetic_of([torch.ones(10)] * 8, truth)
    assert arithmetic(torch.nextafter(torch.ones(10), torch.zeros(10)), known).right
    assert not arithmetic(torch.full((10,), 1 + 2**-20), known).right


def test_what_rounding_may_hide_passes_with_a_note() -> None:
    known = arithmetic_of(samples_of(TRUTH, 0.5), TRUTH)
    other = TRUTH.roll(1)
    other -= TRUTH * projection(other, TRUTH)
    found = arithmetic((TRUTH + other).float(), known)
    assert (found.right, found.note) == (True, HIDDEN)
    # noise that is not of the truth's form does not hide what is
    assert not arithmetic((-TRUTH).float(), known).right
    assert arithmetic(TRUTH.float(), arithmetic_of(SAMPLES, TRUTH)).note == ""


def test_what_is_zero_without_any_noise_is_not_called_noise_and_may_be_the_smallest_number() -> None:
    known = arithmetic_of([torch.zeros(5)] * 8, torch.zeros(5))
    assert arithmetic(torch.zeros(5), known).note == ""
    assert arithmetic(torch.full((5,), 1e-45), known).right
    assert not arithmetic(torch.full((5,), 1e-30), known).right
    assert arithmetic(torch.zeros(0), arithmetic_of([torch.zeros(0)], torch.zeros(0))).right


def test_terms_that_cancel_may_leave_their_rounding() -> None:
    terms = Sum(torch.zeros(5), torch.full((5,), 2e-3), 2, torch.full((5,), 2.0))
    known = arithmetic_of([torch.zeros(5)] * 8, torch.zeros(5), terms)
    assert arithmetic(torch.full((5,), 1e-11), known).right
    assert not arithmetic(torch.full((5,), 1e-8), known).right


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scalar_may_be_a_sum_in_another_order(shape: tuple[int, ...]) -> None:
    terms = drawn(0, 2**17).square()
    samples = [terms.sum().view(shape), terms.flip(0).sum().view(shape)] * 4
    known = arithmetic_of(samples, terms.double().sum().view(shape))
    lanes = torch.zeros(16)
    for each in terms.view(-1, 16):
        lanes += each
    error = abs(lanes.sum().double() - known.truth)
    assert error > known.factor * known.mean_square + terms.sum() * 2**-23  # as Inductor's losses have
    assert arithmetic(lanes.sum().view(shape), known).right
    assert not arithmetic(samples[0] * (1 + 1e-5), known).right


def test_a_mean_that_is_sent_in_half_precision_is_rounded_to_it() -> None:
    terms = Sum(2 * TRUTH, 2 * TRUTH.abs(), 2, torch.full_like(TRUTH, 2))
    sent = TRUTH.to(torch.float16).float()
    assert arithmetic(sent, arithmetic_of(SAMPLES, TRUTH, terms, torch.float16)).right
    assert not arithmetic(sent, arithmetic_of(SAMPLES, TRUTH, terms)).right


def test_zeros_pass_where_eager_has_zeros_too_and_that_is_noted() -> None:
    truth = torch.full((50,), 2e-7, dtype=torch.float64)
    neighbors = [truth.to(torch.float16)] * 7
    zeros = torch.zeros(50, dtype=torch.float16)
    found = arithmetic(zeros, arithmetic_of([zeros, *neighbors], truth))
    assert (found.right, found.note) == (True, ZERO_TOO)
    assert not arithmetic(zeros, arithmetic_of([*neighbors, zeros], truth)).right


def test_nan_in_eager_is_asked_for_in_the_same_places() -> None:
    truth = drawn(0, 50).double()
    samples = samples_of(truth, 1e-7)
    for sample in samples:
        sample[3], sample[4] = math.nan, math.inf
    known = arithmetic_of(samples, truth)
    right = truth.float()
    right[3], right[4] = math.nan, math.inf
    assert arithmetic(right, known).right
    for wrong in (truth.float(), right.nan_to_num(), right.roll(1)):
        assert arithmetic(wrong, known).note == NOT_FINITE
        assert not arithmetic(wrong, known).right
    right[5] += 1
    assert not arithmetic(right, known).right


def test_where_only_some_eager_runs_overflow_nothing_is_asked() -> None:
    truth = drawn(0, 50).double()
    samples = samples_of(truth, 1e-7)
    samples[4][3] = math.inf
    known = arithmetic_of(samples, truth)
    for value in (0.0, math.inf):
        got = truth.float()
        got[3] = value
        assert arithmetic(got, known).right


# ------------------------------------------------------------------------------------ biases, and small rows


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1.05), (torch.float16, 1.01)])
def test_a_factor_over_a_whole_tensor_is_found_although_each_element_is_within_its_bound(
    dtype: torch.dtype, factor: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(64, 64, generator=generator, dtype=torch.float64)

    def computed() -> Tensor:
        """As autocast computes: operands of few digits, a result of many."""
        rounding = torch.rand(truth.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (truth * (1 + 4 * torch.finfo(dtype).eps * rounding)).float()

    known = arithmetic_of([computed() for _ in range(8)], truth)
    assert all(arithmetic(computed(), known).right for _ in range(200))
    biased = computed() * factor
    found = arithmetic(biased, known)
    assert not found.right
    assert found.note == "its projection on the reference is not 1"


def test_a_row_far_smaller_than_the_largest_has_bounds_of_its_own() -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.logspace(0, -9, 10, dtype=torch.float64).unsqueeze(1)
    truth = torch.randn(10, 32, generator=generator, dtype=torch.float64) * sizes

    def computed() -> Tensor:
        rounding = torch.randn(truth.shape, generator=generator, dtype=torch.float64)
        return (truth * (1 + 1e-6 * rounding)).float()

    known = arithmetic_of([computed() for _ in range(8)], truth)
    assert all(arithmetic(computed(), known).right for _ in range(200))
    for row in range(1, 10):
        for change in (torch.zeros_like, torch.neg, lambda values: values * 1.01):
            wrong = computed()
            wrong[row] = change(wrong[row])
            found = arithmetic(wrong, known)
            assert not found.right, (row, change)
