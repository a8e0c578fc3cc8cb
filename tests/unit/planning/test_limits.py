"""Bucket limits read from arguments: defaults, explicit caps, and mistakes answered in words."""

import inspect
import math
import re
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import UsageError
from ddpopt.planning.limits import BucketConfig


def test_an_empty_cap_list_is_as_good_as_none() -> None:
    assert BucketConfig.from_kwargs(bucket_cap_mb_list=[]) == BucketConfig.from_kwargs()


def test_the_environment_asks_for_a_small_last_bucket_with_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "true")  # torch, too, knows only "1"
    assert not BucketConfig.from_kwargs().small_last_bucket


@pytest.mark.parametrize("cap", [0, -1])
def test_with_a_cap_that_no_gradient_is_below_each_has_its_own_bucket(cap: int) -> None:
    config = BucketConfig.from_kwargs(bucket_cap_mb=cap)
    assert config.rebuilt_limits == (0, 0)


DDP_NAMES = ", ".join(sorted({*inspect.signature(DistributedDataParallel).parameters} - {"module"}))
NO_SIZE = "expected bucket_cap_mb and bucket_cap_mb_list in MiB, got {} and {}; pass what you pass to DDP"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_cap_mb": "25"}, NO_SIZE.format("'25'", None)),
        ({"bucket_cap_mb": math.inf}, NO_SIZE.format("inf", None)),
        ({"bucket_cap_mb_list": [3, "1"]}, NO_SIZE.format(None, [3, "1"])),
        ({"bucket_cap_mb_list": 3}, NO_SIZE.format(None, 3)),
        (
            {"static_graph": "yes"},
            "static_graph: expected True or False, got 'yes'; pass what you pass to DDP",
        ),
        (
            {"cap_mb": 1, "bucket_mb": 2},
            "expected arguments of DistributedDataParallel, got 'bucket_mb', 'cap_mb'; "
            "use the names that DDP knows: "
            f"{DDP_NAMES}; "
            "did you mean 'bucket_cap_mb' or 'bucket_cap_mb_list'?",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_named_with_its_value_and_what_to_do(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        BucketConfig.from_kwargs(**arguments)
