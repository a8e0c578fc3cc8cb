"""The bucket rule against reducers that run: one rank, gloo, real DDP modules with each option."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddpopt.ddp.specs import specs_from_ddp, specs_from_module
from ddpopt.planning.limits import BucketConfig
from ddpopt.testing.drawn import DrawnModel, step
from tests.support.rehearsing import assert_buckets_as_predicted

WIDTH = 256  # a weight of 256 KiB and a bias of 1 KiB
KIB = 2**10

pytestmark = [
    pytest.mark.usefixtures("one_rank_group"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
]


# ------------------------------------------------------------------------------------------ models


def linears(count: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


STEPS = (step("linear"), step("unused"), step("gain"), step("empty"), step("linear"))
ROOT_PARAMETERS = DrawnModel(STEPS, width=WIDTH)
"""Parameters of the root module itself, one of them never read."""


def with_marker_alone() -> nn.Module:
    model = linears()
    for param in model.get_submodule("1").parameters():
        vars(param)["_ddp_ignored"] = True
    return model


def with_tied_ignored(*names: str) -> nn.Module:
    model: Any = linears()
    model[4].weight = model[0].weight
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    return model  # type: ignore[no-any-return]


# --------------------------------------------------------------------------- what a reducer does


def assert_limits(ddp: Any) -> BucketConfig:
    """The reducer has the buckets of the rule; what its limits are."""

    def train(_: int) -> None:
        (output,) = tree_leaves(ddp(torch.ones(4, WIDTH)))
        output.float().square().mean().backward()

    return assert_buckets_as_predicted(ddp, train)


SMALL = {"bucket_cap_mb": 0.3}
# What models hold is drawn in tests/property/test_reducer.py; here is what DDP may be told of them.
ROWS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "cap list beside a cap": (linears, {"bucket_cap_mb": 9, "bucket_cap_mb_list": [1, 3, 0.5]}),
    "cap list and unused": (linears, {"bucket_cap_mb_list": [0.5, 0.25], "find_unused_parameters": True}),
    "cap list and static graph": (linears, {"bucket_cap_mb_list": [0.5, 0.25], "static_graph": True}),
    "static graph in unused parameter mode": (
        ROOT_PARAMETERS.program.model,
        {"bucket_cap_mb": 0.1, "static_graph": True, "find_unused_parameters": True},
    ),
    "marker of ignored parameters alone": (with_marker_alone, SMALL),
    "tied weight ignored under its other name": (lambda: with_tied_ignored("0.weight"), SMALL),
    "tied weight ignored under both names": (lambda: with_tied_ignored("0.weight", "4.weight"), SMALL),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_running_reducer_has_the_parameters_and_buckets_we_predict(row: str) -> None:
    make, arguments = ROWS[row]
    ddp: Any = DistributedDataParallel(make(), **arguments)
    params, sparse = ddp._build_params_for_reducer()
    named_params, specs = dict(ddp.module.named_parameters()), specs_from_ddp(ddp)
    assert all(named_params[spec.name] is param for spec, param in zip(specs, params, strict=True))
    assert [spec.sparse for spec in specs] == sparse
    assert assert_limits(ddp) == BucketConfig.from_kwargs(**arguments)


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb_list": [0.5, 0.25, 0.125]}])
def test_limits_set_elsewhere_are_read(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 300 * KIB)
    config = assert_limits(DistributedDataParallel(linears(), **arguments))
    assert config == BucketConfig.from_kwargs(**arguments)
    assert config.small_last_bucket
    assert arguments or config.rebuilt_limits == (300 * KIB, 25 * 2**20)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="DDP itself raises a TypeError when it broadcasts delayed parameters"
)
def test_parameters_whose_all_reduce_is_delayed_are_in_no_bucket() -> None:
    model = linears()
    delayed = [(name, param) for name, param in model.named_parameters() if name.startswith(("1.", "2."))]
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=0.3,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=model.get_parameter("0.weight"),
    )
    assert specs_from_ddp(ddp) == specs_from_module(model, ignored=[name for name, _ in delayed])
    assert_limits(ddp)
