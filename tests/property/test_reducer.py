"""Our bucket rule against torch's own function, on drawn parameter lists."""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpopt.planning.bucket_rule import ParamSpec, initial_buckets, ready_buckets, rebuilt_buckets
from ddpopt.planning.limits import BucketConfig
from tests.support.profiles import share
from tests.support.strategies import bucket_configs, parameter_lists

Buckets = tuple[tuple[int, ...], ...]

# A CUDA device without a GPU: only fake tensors have one. They hold no memory, so one mode serves all tests.
FAKE_MODE = FakeTensorMode()


@cache
def fake_tensor(nbytes: int, dtype: str, device: str) -> torch.Tensor:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    with FAKE_MODE:
        return torch.empty(nbytes // torch_dtype.itemsize, dtype=torch_dtype, device=device)


def torch_buckets(params: Sequence[ParamSpec], limits: Sequence[int], order: Sequence[int] = ()) -> Buckets:
    """What torch's function says of the parameters, or of those that `order` names, in that order."""
    tensors = [fake_tensor(param.nbytes, param.dtype, param.device) for param in params]
    sparse = [param.sparse for param in params]
    given_tensors = [tensors[index] for index in order] or tensors
    compute = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]  # private, the authority
    buckets, _ = compute(given_tensors, list(limits), sparse, list(order))
    return tuple(tuple(bucket) for bucket in buckets)


def rebuilt_by_torch(params: Sequence[ParamSpec], config: BucketConfig, order: Sequence[int]) -> Buckets:
    if not config.small_last_bucket:
        return torch_buckets(params, config.rebuilt_limits, order)
    return torch_buckets(params, config.rebuilt_limits, order[::-1])[::-1]


def rebuilt_by_us(params: Sequence[ParamSpec], config: BucketConfig, ready_order: Sequence[int]) -> Buckets:
    buckets = rebuilt_buckets([params[index] for index in ready_order], config)
    return tuple(tuple(ready_order[place] for place in bucket) for bucket in buckets)


# Three open buckets at the end whose order is not the reverse of their appearance.
COLLIDING = tuple(
    ParamSpec(dtype, torch.empty(0, dtype=getattr(torch, dtype)).element_size(), dtype, "cpu")
    for dtype in ("complex128", "float32", "float8_e5m2")
)


@pytest.mark.long
@share(4)  # with four limits each
@given(parameter_lists(), st.tuples(*[bucket_configs()] * 4))
@example(COLLIDING, (BucketConfig.from_kwargs(),))
def test_initial_and_rebuilt_buckets_are_those_of_torch(
    params: tuple[ParamSpec, ...], configs: tuple[BucketConfig, ...]
) -> None:
    ready_order = random.Random(len(params)).sample(range(len(params)), len(params))
    for config in configs:
        by_torch = torch_buckets(params, config.initial_limits)
        assert initial_buckets(params, config) == by_torch[::-1]  # DDP hands them to its reducer last first
        assert rebuilt_by_us(params, config, ready_order) == rebuilt_by_torch(params, config, ready_order)


@share(5)
@given(parameter_lists(), bucket_configs())
def test_ready_buckets_are_those_of_torch_in_the_order_in_which_they_are_ready(
    params: tuple[ParamSpec, ...], config: BucketConfig
) -> None:
    found = ready_buckets(params, config)
    assert sorted(members for members, _ in found) == sorted(rebuilt_buckets(params, config))
    ends = [max(members) for members, _ in found]
    assert ends == sorted(ends)
    assert all(reason for _, reason in found)
