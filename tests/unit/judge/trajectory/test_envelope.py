"""ddpopt.judge.trajectory.envelope: right runs are inside, as the chance says, and wrong ones outside."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpopt.judge.trajectory.envelope import NEIGHBORS, NOWHERE, Band, band, distance, envelope_factor, scale_of

EAGER = torch.linspace(-1, 1, 1001)


def neighbors(count: int = 12, size: float = 1e-6, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [EAGER + size * torch.randn(EAGER.shape, generator=generator) for _ in range(count)]


def band_of(count: int = 12, size: float = 1e-6) -> Band:
    return band(scale_of(EAGER), [distance(each, EAGER) for each in neighbors(count, size)])


@pytest.mark.parametrize("count", [2, 5, 12])
@pytest.mark.parametrize("chance", [0.01, 0.1])
def test_of_single_numbers_no_more_are_outside_than_the_chance_says(count: int, chance: float) -> None:
    """The worst kind of number: all its errors are one draw, and eager's own is one of them."""
    generator = torch.Generator().manual_seed(0)
    runs = torch.randn(100_000, count + 2, generator=generator, dtype=torch.float64)
    eager, judged, others = runs[:, 0], runs[:, 1], runs[:, 2:]
    spread = (others - eager[:, None]).square().mean(1).sqrt()
    outside = ((judged - eager).abs() > envelope_factor(count, chance) * spread).double().mean()
    assert outside <= 1.1 * chance
    assert count < NEIGHBORS or outside > 0.1 * chance  # with few neighbors it is wider than it must be


@given(st.integers(0, 1000), st.floats(1e-7, 1e-3))
def test_one_more_neighbor_is_inside(seed: int, size: float) -> None:
    one_more = neighbors(1, size, seed + 1)[0]
    assert band_of(size=size).reach(distance(one_more, EAGER)).share < 1


@pytest.mark.parametrize(
    ("wrong", "measure"),
    [
        (EAGER + 3e-5, "root mean square"),
        (EAGER.clone().index_fill(0, torch.tensor([7]), 0.5), "largest difference"),
        (EAGER * (1 + 1e-5), "factor that all elements have in common, off 1 by"),
        (torch.zeros_like(EAGER), "factor that all elements have in common, off 1 by"),
    ],
)
def test_what_is_farther_is_outside_by_one_measure(wrong: torch.Tensor, measure: str) -> None:
    reach = band_of(size=1e-6).reach(distance(wrong, EAGER))
    assert reach.share > 1
    assert reach.measure == measure


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_inside_unless_eager_is_alike(odd: float) -> None:
    value = EAGER.clone()
    value[3] = odd
    assert distance(value, EAGER) == NOWHERE
    assert distance(EAGER, value) == NOWHERE
    assert distance(value, value).rms == 0
    assert band_of().reach(NOWHERE).share == math.inf


def test_an_envelope_as_wide_as_the_values_says_nothing_and_equal_neighbors_leave_rounding() -> None:
    assert not band_of(size=0.1).says_something
    assert band_of(size=1e-3).says_something
    equal = band(scale_of(EAGER), [distance(EAGER, EAGER)] * 12)
    assert equal.says_something
    assert equal.reach(distance(EAGER.nextafter(torch.tensor(2.0)), EAGER)).share <= 1
    assert equal.reach(distance(EAGER + 1e-5, EAGER)).share > 1


def test_whole_numbers_must_be_equal() -> None:
    count = torch.tensor(5)
    equal = band(scale_of(count), [distance(count, count)] * 12)
    assert equal.reach(distance(count, count)).share == 0
    assert equal.reach(distance(count + 1, count)).share == math.inf


def test_fewer_than_two_neighbors_say_nothing() -> None:
    assert not band(scale_of(EAGER), [distance(EAGER, EAGER)]).says_something
    assert not band(scale_of(EAGER), [NOWHERE]).says_something
