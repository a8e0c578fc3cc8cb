"""Bucket limits read from arguments: defaults, explicit caps, and mistakes answered in words."""

import re
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import UsageError
from ddpopt.planning.limits import (
    DEFAULT_CAP_MB,
    DEFAULT_FIRST_BUCKET_BYTES,
    MIB,
    BucketConfig,
)


def from_unchecked(**arguments: Any) -> BucketConfig:
    """As a caller without a type checker may call it."""
    return BucketConfig.from_kwargs(**arguments)


def stand_in_for_ddp(**attributes: object) -> DistributedDataParallel:
    return cast(DistributedDataParallel, SimpleNamespace(**attributes))


def test_by_default_the_first_bucket_closes_at_one_mib_and_the_others_at_25() -> None:
    config = BucketConfig.from_kwargs()
    assert (config.first_bucket_bytes, config.cap_bytes) == (MIB, 25 * MIB)
    assert config.rebuilt_limits == (MIB, 25 * MIB)


def test_an_explicit_cap_bounds_the_first_bucket_too_even_if_it_is_the_default_one() -> None:
    assert BucketConfig.from_kwargs(bucket_cap_mb=25).rebuilt_limits == (25 * MIB, 25 * MIB)


def test_a_fraction_of_a_mib_is_cut_to_whole_bytes() -> None:
    assert BucketConfig.from_kwargs(bucket_cap_mb=0.3).cap_bytes == 314572


def test_a_cap_list_wins_over_the_cap_and_bounds_initial_and_rebuilt_buckets() -> None:
    config = BucketConfig.from_kwargs(bucket_cap_mb=9, bucket_cap_mb_list=[1, 3, 0.5])
    assert config.rebuilt_limits == config.initial_limits == (MIB, 3 * MIB, MIB // 2)
    assert config.cap_bytes == config.first_bucket_bytes == 3 * MIB


def test_an_empty_cap_list_is_as_good_as_none() -> None:
    assert BucketConfig.from_kwargs(bucket_cap_mb_list=[]) == BucketConfig.from_kwargs()


@pytest.mark.parametrize(
    ("unused", "static", "rebuilds", "initial"),
    [
        (False, False, True, (sys.maxsize,)),
        (False, True, True, (sys.maxsize,)),
        (True, True, True, (sys.maxsize,)),
        (True, False, False, (MIB, 25 * MIB)),
    ],
)
def test_only_unused_parameter_mode_without_a_static_graph_keeps_its_initial_buckets(
    unused: bool, static: bool, rebuilds: bool, initial: tuple[int, ...]
) -> None:
    config = BucketConfig.from_kwargs(find_unused_parameters=unused, static_graph=static)
    assert config.rebuilds is rebuilds
    assert config.initial_limits == initial


def test_an_explicit_cap_is_the_only_initial_limit_of_unused_parameter_mode() -> None:
    assert BucketConfig.from_kwargs(bucket_cap_mb=2, find_unused_parameters=True).initial_limits == (2 * MIB,)


def test_the_environment_can_ask_for_a_small_last_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    assert BucketConfig.from_kwargs().small_last_bucket
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "true")  # torch, too, knows only "1"
    assert not BucketConfig.from_kwargs().small_last_bucket


def test_arguments_of_ddp_without_effect_on_limits_are_taken() -> None:
    config = BucketConfig.from_kwargs(bucket_cap_mb=1, gradient_as_bucket_view=True, process_group=None)
    assert config == BucketConfig.from_kwargs(bucket_cap_mb=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"bucket_cap_mb": 0},
            "bucket_cap_mb: expected a positive finite number of MiB, got 0; "
            "pass what you pass to DDP, or leave it out for DDP's default",
        ),
        (
            {"bucket_cap_mb": "25"},
            "bucket_cap_mb: expected a positive finite number of MiB, got '25'; "
            "pass what you pass to DDP, or leave it out for DDP's default",
        ),
        (
            {"bucket_cap_mb": float("inf")},
            "bucket_cap_mb: expected a positive finite number of MiB, got inf; "
            "pass what you pass to DDP, or leave it out for DDP's default",
        ),
        (
            {"bucket_cap_mb": True},
            "bucket_cap_mb: expected a positive finite number of MiB, got True; "
            "pass what you pass to DDP, or leave it out for DDP's default",
        ),
        (
            {"bucket_cap_mb_list": [3, -1]},
            "bucket_cap_mb_list[1]: expected a positive finite number of MiB, got -1; "
            "pass what you pass to DDP, or leave it out for DDP's default",
        ),
        (
            {"bucket_cap_mb_list": 3},
            "bucket_cap_mb_list: expected a list of MiB, got 3; for one cap use bucket_cap_mb",
        ),
        (
            {"static_graph": "yes"},
            "static_graph: expected True or False, got 'yes'; pass what you pass to DDP",
        ),
        (
            {"find_unused_parameters": 1},
            "find_unused_parameters: expected True or False, got 1; pass what you pass to DDP",
        ),
        (
            {"cap_mb": 1, "bucket_mb": 2},
            "expected arguments of DistributedDataParallel, got 'bucket_mb', 'cap_mb'; "
            "use the names that DDP knows: "
            "batched_grad_copy, broadcast_buffers, bucket_cap_mb, bucket_cap_mb_list, check_reduction, "
            "delay_all_reduce_named_params, device_ids, device_mesh, dim, find_unused_parameters, "
            "forward_sync_buffers, gradient_as_bucket_view, init_sync, mixed_precision, output_device, "
            "param_to_hook_all_reduce, process_group, skip_all_reduce_unused_params, static_graph; "
            "did you mean 'bucket_cap_mb' or 'bucket_cap_mb_list'?",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_named_with_what_came_and_what_to_do(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        from_unchecked(**arguments)


def test_a_module_outside_ddp_is_refused_with_advice() -> None:
    with pytest.raises(UsageError) as caught:
        BucketConfig.from_ddp(stand_in_for_ddp())
    assert str(caught.value).startswith(
        "expected a DistributedDataParallel of torch 2.11 to 2.13, got 'SimpleNamespace' under torch "
    )
    assert str(caught.value).endswith(
        "wrap the model in DistributedDataParallel, or use BucketConfig.from_kwargs"
    )


# What moves in torch must fail here, by name.


def test_torchs_default_first_bucket_is_still_ours() -> None:
    default: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]  # private, the authority
    assert default == DEFAULT_FIRST_BUCKET_BYTES


def test_a_ddp_module_of_torch_2_11_tells_its_limits_without_a_bucket_config() -> None:
    caps = {"bucket_bytes_cap": 25 * MIB, "bucket_bytes_cap_list": []}
    flags = {"find_unused_parameters": False, "static_graph": False}
    by_default = stand_in_for_ddp(bucket_bytes_cap_default=True, **caps, **flags)
    assert BucketConfig.from_ddp(by_default) == BucketConfig.from_kwargs()
    explicit = stand_in_for_ddp(bucket_bytes_cap_default=False, **caps, **flags)
    assert BucketConfig.from_ddp(explicit) == BucketConfig.from_kwargs(bucket_cap_mb=DEFAULT_CAP_MB)
