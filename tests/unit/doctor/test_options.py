"""Which options the doctor speaks of, what it says of them, and when it is silent."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddpopt.doctor.diagnosis import Unused, Weight
from ddpopt.doctor.options import Settings, option_findings, read_settings
from ddpopt.doctor.parameters import unused_findings

MIB = 2**20
QUIET = Settings(
    ddp_kwargs={"gradient_as_bucket_view": True},
    buckets=4,
    gradient_bytes=64 * MIB,
    largest_bytes=MIB,
    buffers=0,
    buffer_bytes=0,
    on_cuda=False,
    optimize_ddp=True,
    suppress_errors=False,
    disabled=False,
    compiled_autograd=False,
    environment={},
    debug_level="OFF",
)


def findings(**changes: Any) -> list[tuple[Weight, str, str]]:
    return [(f.weight, f.what, f.step) for f in option_findings(replace(QUIET, **changes))]


def test_settings_that_do_no_harm_are_not_mentioned() -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"disabled": True}, "Dynamo is turned off"),
        ({"optimize_ddp": False}, "torch._dynamo.config.optimize_ddp is False"),
        ({"optimize_ddp": "no_optimization"}, "torch._dynamo.config.optimize_ddp is 'no_optimization'"),
        ({"optimize_ddp": "python_reducer"}, "torch._dynamo.config.optimize_ddp is 'python_reducer'"),
        ({"suppress_errors": True}, "torch._dynamo.config.suppress_errors is True"),
        ({"debug_level": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        ({"on_cuda": True, "environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "CUDA_LAUNCH_BLOCKING=1"),
        ({"buckets": 1}, "All gradients, 64.000 MiB, are one bucket"),
    ],
)
def test_a_setting_that_costs_overlap_is_named(changes: dict[str, Any], start: str) -> None:
    ((weight, what, step),) = findings(**changes)
    assert weight is Weight.SLOW
    assert what.startswith(start)
    assert step


@pytest.mark.parametrize(
    "changes",
    [
        {"optimize_ddp": "python_reducer", "compiled_autograd": True},
        {"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
        {"debug_level": "INFO"},
        {"buffers": 3, "ddp_kwargs": {"gradient_as_bucket_view": True, "broadcast_buffers": False}},
        {"ddp_kwargs": {}, "gradient_bytes": MIB},
        {"buckets": None},
    ],
)
def test_a_setting_is_not_blamed_where_it_does_nothing(changes: dict[str, Any]) -> None:
    assert findings(**changes) == []


def test_the_cap_that_is_proposed_divides_the_gradients_by_four() -> None:
    ((_, _, step),) = findings(buckets=1, gradient_bytes=10 * MIB)
    assert step == "Lower the cap: bucket_cap_mb=2.5 makes about 4 buckets."


def test_one_bucket_of_a_small_model_is_no_problem() -> None:
    ((weight, _, step),) = findings(buckets=1, gradient_bytes=1000)
    assert weight is Weight.NOTE
    assert step.startswith("None: ")


def test_one_bucket_that_is_mostly_one_gradient_cannot_be_divided() -> None:
    ((weight, what, _),) = findings(buckets=1, largest_bytes=60 * MIB)
    assert weight is Weight.NOTE
    assert "one gradient alone has 60.000 MiB" in what


def test_settings_are_read_from_the_model_and_from_this_process() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with torch._dynamo.config.patch(optimize_ddp=False, suppress_errors=True):
        settings = read_settings(model, {"bucket_cap_mb": 2}, 1)
    assert (settings.gradient_bytes, settings.largest_bytes) == (4 * (8 + 2 + 2 + 2), 32)
    assert (settings.buffers, settings.buffer_bytes) == (3, 4 * 4 + 8)
    assert (settings.optimize_ddp, settings.suppress_errors, settings.on_cuda) == (False, True, False)


NEVER = Unused("w", ((0, 0), (0, 1), (1, 0), (1, 1)), always=True)
ON_RANK_1 = Unused("w", ((1, 0), (1, 1)), always=False)
AT_TIMES = Unused("w", ((0, 1),), always=False)


@pytest.mark.parametrize(
    ("unused", "options", "said"),
    [
        ((), {}, []),
        ((), {"static_graph": True}, []),
        ((), {"find_unused_parameters": True}, [("options", Weight.SLOW)]),
        ((NEVER,), {}, [("parameters", Weight.WRONG)]),
        ((NEVER,), {"static_graph": True}, [("parameters", Weight.SLOW)]),
        (
            (NEVER,),
            {"find_unused_parameters": True},
            [("parameters", Weight.SLOW), ("options", Weight.SLOW)],
        ),
        ((ON_RANK_1,), {}, [("parameters", Weight.WRONG)]),
        ((ON_RANK_1,), {"find_unused_parameters": True}, [("parameters", Weight.NOTE)]),
        ((ON_RANK_1,), {"static_graph": True}, [("parameters", Weight.NOTE)]),
        ((AT_TIMES,), {"static_graph": True}, [("parameters", Weight.WRONG)]),
        ((AT_TIMES,), {"find_unused_parameters": True}, [("parameters", Weight.NOTE)]),
        (
            (),
            {"find_unused_parameters": True, "static_graph": True},
            [("options", Weight.NOTE)],
        ),
    ],
)
def test_unused_parameters_are_weighed_by_what_ddp_was_told(
    unused: tuple[Unused, ...], options: dict[str, bool], said: list[tuple[str, Weight]]
) -> None:
    found = unused_findings(unused, (), options, steps=2)
    assert [(finding.topic, finding.weight) for finding in found] == said


def test_parameters_that_ddp_ignores_are_not_unused() -> None:
    assert list(unused_findings((NEVER,), ("w",), {}, steps=2)) == []
