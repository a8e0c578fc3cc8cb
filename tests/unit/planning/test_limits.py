"""Bucket limits read from arguments: defaults, explicit caps, and mistakes answered in words."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.specs import limits_of, specs_from_module
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import initial_buckets, rebuilt_buckets
from ddpopt.planning.limits import BucketConfig
from tests.support.refusals import refusal


def test_the_environment_asks_for_a_small_last_bucket_with_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "true")  # torch, too, knows only "1"
    assert not BucketConfig.from_kwargs().small_last_bucket


SIZES = (0, -1, -1e-9, 0.01, "5", None, math.nan, math.inf, True, 2**43 - 1, 2**43, -(2**43) - 1, [5])


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("key", ["bucket_cap_mb", "bucket_cap_mb_list"])
def test_ddps_constructor_takes_the_same_caps_and_fills_the_same_buckets(key: str, unused: bool) -> None:
    lists: tuple[Any, ...] = (*([size] for size in SIZES), [0, 0.01], [1, -1], [], 5, "5", None)
    for given in SIZES if key == "bucket_cap_mb" else lists:
        arguments: dict[str, Any] = {key: given, "find_unused_parameters": unused}
        try:
            ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), **arguments)
        except AssertionError:
            assert torch.__version__ < "2.13"  # which refuses 0
            continue
        except (TypeError, ValueError, OverflowError):
            with pytest.raises(UsageError, match="in MiB, got "):
                BucketConfig.from_kwargs(**arguments)
            continue
        config = BucketConfig.from_kwargs(**arguments)
        assert config == limits_of(ddp), given
        for _ in range(4):  # torch logs rebuilt buckets a step later
            ddp(torch.ones(2, 64)).sum().backward()
        data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # of torch
        ready = tuple(reversed(specs_from_module(ddp.module)))
        buckets = initial_buckets(ready[::-1], config) if unused else rebuilt_buckets(ready, config)
        sizes = data["bucket_sizes" if unused else "rebuilt_bucket_sizes"]
        assert len(sizes.split(",")) == len(buckets), (given, sizes)


DDP_NAMES = ", ".join(sorted({*inspect.signature(DistributedDataParallel).parameters} - {"module"}))
NO_SIZE = "expected bucket_cap_mb and bucket_cap_mb_list in MiB, got {} and {}; pass sizes that DDP takes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_cap_mb": "25"}, NO_SIZE.format("'25'", None)),
        ({"bucket_cap_mb_list": [3, "1"]}, NO_SIZE.format(None, [3, "1"])),
        (
            {"static_graph": "yes"},
            "static_graph: expected True or False, got 'yes'; pass what you pass to DDP",
        ),
        (
            {"cap_mb": 1, "bucket_mb": 2},
            "expected arguments of DistributedDataParallel, got 'bucket_mb', 'cap_mb'; "
            f"use the names that DDP knows: {DDP_NAMES}; "
            "did you mean 'bucket_cap_mb' or 'bucket_cap_mb_list'?",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_named_with_its_value_and_what_to_do(arguments: dict[str, Any], message: str) -> None:
    assert refusal(lambda: BucketConfig.from_kwargs(**arguments)) == message
