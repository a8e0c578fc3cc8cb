"""The bucket rule by itself, and what it counts of a module."""

import pytest
import torch
from torch import nn

from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec, assign_buckets, specs_from_module


def params(*nbytes: int, dtype: str = "float32", device: str = "cpu") -> list[ParamSpec]:
    return [ParamSpec(f"p{place}", size, dtype, device) for place, size in enumerate(nbytes)]


def test_no_limits_are_a_mistake() -> None:
    with pytest.raises(UsageError) as caught:
        assign_buckets(params(1), [])
    assert str(caught.value) == (
        "limits: expected at least one size in bytes, got none; use BucketConfig.rebuilt_limits"
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
