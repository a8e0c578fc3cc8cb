"""ddpopt.judge.trajectory.envelope: right runs are inside, as the chance says, and wrong ones outside."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ddpopt.judge.compare import ulps as ulps_of_tensors
from ddpopt.judge.trajectory.envelope import (
    NEIGHBORS,
    NOWHERE,
    Array,
    Band,
    Scale,
    band,
    distance,
    envelope_factor,
    is_explained,
    scale_of,
    ulps,
)

EAGER = np.linspace(-1, 1, 1001, dtype=np.float32)


def scale() -> Scale:
    return scale_of(EAGER, torch.float32)


def neighbors(count: int = 12, size: float = 1e-6, seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [(EAGER + size * generator.standard_normal(EAGER.shape)).astype(np.float32) for _ in range(count)]


def band_of(count: int = 12, size: float = 1e-6) -> Band:
    return band(scale(), [distance(each, EAGER) for each in neighbors(count, size)])


@pytest.mark.parametrize("count", [2, 5, 12])
@pytest.mark.parametrize("chance", [0.01, 0.1])
def test_of_single_numbers_no_more_are_outside_than_the_chance_says(count: int, chance: float) -> None:
    """The worst kind of number: all its errors are one draw, and eager's own is one of them."""
    runs = np.random.default_rng(0).standard_normal((100_000, count + 2))
    eager, judged, others = runs[:, 0], runs[:, 1], runs[:, 2:]
    spread = np.sqrt(np.square(others - eager[:, None]).mean(1))
    outside = (np.abs(judged - eager) > envelope_factor(count, chance) * spread).mean()
    assert outside <= 1.1 * chance
    assert count < NEIGHBORS or outside > 0.1 * chance  # with few neighbors it is wider than it must be


@given(st.integers(0, 1000), st.floats(1e-7, 1e-3))
def test_one_more_neighbor_is_inside(seed: int, size: float) -> None:
    one_more = neighbors(1, size, seed + 1)[0]
    assert band_of(size=size).reach(distance(one_more, EAGER)).share < 1


@pytest.mark.parametrize(
    ("wrong", "measure"),
    [
        (EAGER + np.float32(3e-5), "root mean square"),
        (np.where(np.arange(1001) == 7, np.float32(0.5), EAGER), "largest difference"),
        (EAGER * np.float32(1 + 1e-5), "factor that all elements have in common, off 1 by"),
        (np.zeros_like(EAGER), "factor that all elements have in common, off 1 by"),
    ],
)
def test_what_is_farther_is_outside_by_one_measure(wrong: Array, measure: str) -> None:
    reach = band_of(size=1e-6).reach(distance(wrong, EAGER))
    assert reach.share > 1
    assert reach.measure == measure


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_inside_unless_eager_is_alike(odd: float) -> None:
    value = EAGER.copy()
    value[3] = odd
    assert distance(value, EAGER) == NOWHERE
    assert distance(EAGER, value) == NOWHERE
    assert distance(value, value).rms == 0
    assert band_of().reach(NOWHERE).share == math.inf


def test_an_envelope_as_wide_as_the_values_says_nothing_and_equal_neighbors_leave_rounding() -> None:
    assert not band_of(size=0.1).says_something
    assert band_of(size=1e-3).says_something
    equal = band(scale(), [distance(EAGER, EAGER)] * 12)
    assert equal.says_something
    assert equal.reach(distance(np.nextafter(EAGER, np.float32(2)), EAGER)).share <= 1
    assert equal.reach(distance(EAGER + np.float32(1e-5), EAGER)).share > 1


def test_whole_numbers_must_be_equal() -> None:
    count = np.array(5)
    equal = band(scale_of(count, torch.int64), [distance(count, count)] * 12)
    assert equal.reach(distance(count, count)).share == 0
    assert equal.reach(distance(count + 1, count)).share == math.inf


def test_fewer_than_two_neighbors_say_nothing() -> None:
    assert not band(scale(), [distance(EAGER, EAGER)]).says_something
    assert not band(scale(), [NOWHERE]).says_something


def test_what_eager_and_its_neighbors_share_widens_the_envelope() -> None:
    neighbors_agree = [distance(EAGER, EAGER)] * 12
    shifted = EAGER + np.float32(1e-6)
    alone = band(scale(), neighbors_agree)
    assert alone.reach(distance(shifted, EAGER)).share > 1
    with_truth = band(scale(), neighbors_agree, distance(EAGER + np.float32(2e-7), EAGER))
    assert with_truth.reach(distance(shifted, EAGER)).share < 1
    assert is_explained(scale(), neighbors_agree, distance(EAGER + np.float32(2e-7), EAGER))
    assert not is_explained(scale(), neighbors_agree, distance(-EAGER, EAGER))


@example([0.0, 0.0, math.inf], 0, "float32")
@given(
    st.lists(st.floats(width=32), min_size=1), st.integers(0, 100), st.sampled_from(["float32", "bfloat16"])
)
def test_units_in_the_last_place_are_those_of_tensors(values: list[float], seed: int, name: str) -> None:
    dtype = getattr(torch, name)
    one = torch.tensor(values).to(dtype)
    other = one[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
    found = ulps(one.float().numpy(), other.float().numpy(), dtype)
    expected = ulps_of_tensors(one, other)
    assert ulps(one[0].float().numpy(), one[0].float().numpy(), dtype) == 0
    assert found == expected or (math.isnan(found) and math.isnan(expected))
