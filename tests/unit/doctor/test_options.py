"""Which options the doctor speaks of, what it says of them, and when it is silent."""

import os
from typing import Any

import pytest
import torch
from torch import nn

from ddpopt.doctor.diagnosis import Unused, Weight
from ddpopt.doctor.options import option_findings
from ddpopt.doctor.parameters import unused_findings

LARGE: dict[str, Any] = {"in_features": 512, "out_features": 512, "bias": False, "device": "meta"}


def findings(*layers: nn.Module, buckets: int | None = 4) -> list[tuple[Weight, str, str]]:
    return [(f.weight, f.what, f.step) for f in option_findings(nn.Sequential(*layers), buckets)]


def test_settings_that_do_no_harm_are_not_mentioned() -> None:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True):
        assert findings() == []


@pytest.mark.parametrize(
    ("setting", "start"),
    [
        ({"disable": True}, "Dynamo is turned off"),
        ({"optimize_ddp": False}, "torch._dynamo.config.optimize_ddp is False"),
        ({"optimize_ddp": "python_reducer"}, "torch._dynamo.config.optimize_ddp is 'python_reducer'"),
        ({"suppress_errors": True}, "torch._dynamo.config.suppress_errors is True"),
    ],
)
def test_a_setting_that_costs_overlap_is_named(setting: dict[str, Any], start: str) -> None:
    with torch._dynamo.config.patch(setting):
        ((weight, what, step),) = findings()
    assert weight is Weight.SLOW
    assert what.startswith(start)
    assert step


def test_variables_that_make_ranks_wait_are_named_where_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert findings() == []  # nothing is on a GPU
    level = torch.distributed.get_debug_level()  # type: ignore[attr-defined]  # of torch
    assert level.name == "OFF"
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    try:
        ((_, what, _),) = findings()
    finally:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
        torch.distributed.set_debug_level_from_env()  # type: ignore[attr-defined]
    assert what.startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL")


def test_the_cap_that_is_proposed_divides_the_gradients_by_four() -> None:
    ((weight, what, step),) = findings(*(nn.Linear(**LARGE) for _ in range(10)), buckets=1)
    assert weight is Weight.SLOW
    assert what.startswith("All gradients, 10.000 MiB, are one bucket")
    assert step == "Lower the cap: bucket_cap_mb=2.5 makes about 4 buckets."


def test_one_bucket_that_cannot_be_divided_to_any_use_is_no_problem() -> None:
    ((weight, _, step),) = findings(nn.Linear(4, 4), buckets=1)
    assert (weight, step.partition(":")[0]) == (Weight.NOTE, "None")
    ((weight, what, _),) = findings(nn.Linear(**{**LARGE, "in_features": 2048}), nn.Linear(4, 4), buckets=1)
    assert weight is Weight.NOTE
    assert "a single gradient has 4.000 MiB" in what


NEVER = Unused("w", ((0, 0), (0, 1), (1, 0), (1, 1)), always=True)
ON_RANK_1 = Unused("w", ((1, 0), (1, 1)), always=False)
AT_TIMES = Unused("w", ((0, 1),), always=False)


@pytest.mark.parametrize(
    ("unused", "options", "said"),
    [
        ((), {}, []),
        ((), {"find_unused_parameters": True}, [("options", Weight.SLOW)]),
        ((NEVER,), {}, [("parameters", Weight.WRONG)]),
        ((NEVER,), {"static_graph": True}, [("parameters", Weight.SLOW)]),
        ((NEVER,), {"find_unused_parameters": True}, [("parameters", Weight.SLOW), ("options", Weight.SLOW)]),
        ((ON_RANK_1,), {"find_unused_parameters": True}, [("parameters", Weight.NOTE)]),
        ((ON_RANK_1,), {"static_graph": True}, [("parameters", Weight.NOTE)]),
        ((AT_TIMES,), {"static_graph": True}, [("parameters", Weight.WRONG)]),
        ((AT_TIMES,), {"find_unused_parameters": True}, [("parameters", Weight.NOTE)]),
        ((), {"find_unused_parameters": True, "static_graph": True}, []),
    ],
)
def test_the_weight_of_unused_parameters_follows_the_arguments_of_ddp(
    unused: tuple[Unused, ...], options: dict[str, bool], said: list[tuple[str, Weight]]
) -> None:
    found = unused_findings(unused, (), options, steps=2)
    assert [(finding.topic, finding.weight) for finding in found] == said
    assert [*unused_findings((NEVER,), ("w",), {}, steps=2)] == []  # DDP ignores it
