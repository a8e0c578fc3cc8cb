"""The bucket rule by itself, and what it counts of a module."""

import pytest
import torch
from torch import nn

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec, assign_buckets, specs_from_module


def params(*nbytes: int, dtype: str = "float32", device: str = "cpu") -> list[ParamSpec]:
    return [ParamSpec(f"p{place}", size, dtype, device) for place, size in enumerate(nbytes)]


def test_a_bucket_closes_after_the_tensor_that_fills_it() -> None:
    assert assign_buckets(params(16, 24, 4), [40]) == ((0, 1), (2,))
    assert assign_buckets(params(16, 20, 28, 4), [40]) == ((0, 1, 2), (3,))


def test_the_last_limit_repeats() -> None:
    assert assign_buckets(params(4, 8, 12, 16, 12, 8), [4, 20]) == ((0,), (1, 2), (3, 4), (5,))


def test_each_dtype_and_device_fills_its_own_bucket_and_walks_its_own_limits() -> None:
    halves, floats = params(4, 4, 4, dtype="bfloat16"), params(4, 4, 4)
    mixed = [param for pair in zip(halves, floats, strict=True) for param in pair]
    assert assign_buckets(mixed, [4, 8]) == ((0,), (1,), (2, 4), (3, 5))
    devices = [*params(4, 4, device="cuda:0"), *params(4, 4, device="cuda:1")]
    assert assign_buckets(devices, [4, 8]) == ((0,), (2,), (3,), (1,))


def test_a_sparse_gradient_stands_alone_where_it_comes_and_fills_nothing() -> None:
    dense, sparse = params(4, 4), ParamSpec("table", 10**9, "float32", "cpu", sparse=True)
    assert assign_buckets([dense[0], sparse, dense[1]], [8]) == ((1,), (0, 2))


def test_a_parameter_without_elements_fills_a_bucket_only_at_limit_zero() -> None:
    assert assign_buckets(params(0, 0), [1]) == ((0, 1),)
    assert assign_buckets(params(0, 0), [0]) == ((0,), (1,))


def test_no_parameters_make_no_buckets() -> None:
    assert assign_buckets([], [1]) == ()


def test_no_limits_are_a_mistake() -> None:
    with pytest.raises(UsageError) as caught:
        assign_buckets(params(1), [])
    assert str(caught.value) == (
        "limits: expected at least one size in bytes, got none; use BucketConfig.rebuilt_limits"
    )


def test_a_single_ignored_name_must_stand_in_a_list() -> None:
    with pytest.raises(UsageError) as caught:
        specs_from_module(nn.Linear(2, 2), ignored="bias")
    assert str(caught.value) == (
        "ignored: expected a list of parameter names, got the string 'bias'; use ['bias']"
    )


def test_a_tied_parameter_is_left_out_only_if_all_its_names_are_ignored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model.get_submodule("1").register_parameter("weight", model.get_parameter("0.weight"))
    under_one_name = specs_from_module(model, ignored=["0.weight"])
    assert [spec.name for spec in under_one_name] == ["0.bias", "0.weight"]
    assert [spec.name for spec in specs_from_module(model, ignored=["0.weight", "1.weight"])] == ["0.bias"]


def test_meta_parameters_have_the_bytes_of_real_ones() -> None:
    with torch.device("meta"):
        specs = specs_from_module(nn.Linear(10**5, 10**5))
    assert specs == (
        ParamSpec("weight", 4 * 10**10, "float32", "meta"),
        ParamSpec("bias", 4 * 10**5, "float32", "meta"),
    )
