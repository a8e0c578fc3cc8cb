"""Our buckets against those of reducers that run: one rank, gloo, real DDP modules with each option."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.planning.bucket_rule import initial_buckets, rebuilt_buckets, specs_from_ddp, specs_from_module
from ddpopt.planning.limits import BucketConfig

WIDTH = 256  # a weight of 256 KiB and a bias of 1 KiB
KIB = 2**10

pytestmark = [
    pytest.mark.usefixtures("one_rank_group"),
    pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning"),
]


# ------------------------------------------------------------------------------------------ models


def linears(count: int = 6) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def ignoring(model: nn.Module, *names: str) -> nn.Module:
    untyped: Any = DistributedDataParallel
    untyped._set_params_and_buffers_to_ignore_for_model(model, names)
    return model


class RootParameters(nn.Module):
    """Parameters of the root module itself, one of them never read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.empty = nn.Parameter(torch.ones(0))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x) * self.scale)
        return y + self.empty.sum()


def with_marker_alone() -> nn.Module:
    model = linears()
    for param in model.get_submodule("1").parameters():
        vars(param)["_ddp_ignored"] = True
    return model


def with_tied_weight_ignored_under_one_name() -> nn.Module:
    model: Any = linears()
    model[4].weight = model[0].weight
    return ignoring(model, "0.weight")


# --------------------------------------------------------------------------- what a reducer does


Buckets = tuple[tuple[int, ...], ...]
"""Each bucket by the places of its parameters in the reducer's order."""


@dataclass
class Observed:
    """What a DDP module does in four steps."""

    ddp: Any

    def __post_init__(self) -> None:
        self.specs, self.config = specs_from_ddp(self.ddp), BucketConfig.from_ddp(self.ddp)
        ready: list[list[str]] = []
        param: Any  # torch leaves the hook's registration untyped
        for name, param in self.ddp.module.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, name=name: ready[-1].append(name))
        for _ in range(4):
            ready.append([])
            self.ddp(torch.ones(4, WIDTH)).float().square().mean().backward()
        places = {spec.name: place for place, spec in enumerate(self.specs)}
        order = [places[name] for name in ready[1 if self.config.static_graph else 0] if name in places]
        self.ready_order = (*order, *(place for place in places.values() if place not in order))
        self.log: dict[str, Any] = self.ddp._get_ddp_logging_data()

    def sizes(self, buckets: Buckets) -> tuple[int, ...]:
        return tuple(sum(self.specs[place].nbytes for place in bucket) for bucket in buckets)

    def assert_rebuilt_as_predicted(self) -> None:
        predicted: Buckets = ()
        if self.config.rebuilds:
            ready = rebuilt_buckets([self.specs[place] for place in self.ready_order], self.config)
            predicted = tuple(tuple(self.ready_order[place] for place in bucket) for bucket in ready)
        rebuilt = self.log.get("rebuilt_per_bucket_param_indices", "")
        assert (tuple(map(numbers, rebuilt.split(","))) if rebuilt else ()) == predicted
        assert numbers(self.log.get("rebuilt_bucket_sizes", "")) == self.sizes(predicted)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


# What models hold is drawn in tests/property/test_reducer.py; here is what DDP may be told of them.
ROWS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "default cap": (linears, {}),
    "cap below every parameter": (linears, {"bucket_cap_mb": 1e-6}),
    "cap list beside a cap": (linears, {"bucket_cap_mb": 9, "bucket_cap_mb_list": [1, 3, 0.5]}),
    "cap list and unused": (linears, {"bucket_cap_mb_list": [0.5, 0.25], "find_unused_parameters": True}),
    "cap list and static graph": (linears, {"bucket_cap_mb_list": [0.5, 0.25], "static_graph": True}),
    "default cap and unused": (RootParameters, {"find_unused_parameters": True}),
    "explicit cap and unused": (RootParameters, {"bucket_cap_mb": 0.3, "find_unused_parameters": True}),
    "static graph with unused": (RootParameters, {"bucket_cap_mb": 0.1, "static_graph": True}),
    "static graph in unused parameter mode": (
        RootParameters,
        {"bucket_cap_mb": 0.1, "static_graph": True, "find_unused_parameters": True},
    ),
    "marker of ignored parameters alone": (with_marker_alone, {"bucket_cap_mb": 0.3}),
    "tied weight ignored under one name": (with_tied_weight_ignored_under_one_name, {"bucket_cap_mb": 0.3}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_running_reducer_has_the_parameters_and_buckets_we_predict(row: str) -> None:
    make, arguments = ROWS[row]
    ddp: Any = DistributedDataParallel(make(), **arguments)
    params, sparse = ddp._build_params_for_reducer()
    observed = Observed(ddp)
    named = dict(ddp.module.named_parameters())
    pairs = zip(observed.specs, params, strict=True)
    assert all(named[spec.name] is param for spec, param in pairs)
    assert [spec.sparse for spec in observed.specs] == sparse
    assert observed.config == BucketConfig.from_kwargs(**arguments)
    initial = initial_buckets(observed.specs, observed.config)
    assert numbers(observed.log["bucket_sizes"]) == observed.sizes(initial)
    observed.assert_rebuilt_as_predicted()


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb_list": [0.5, 0.25, 0.125]}])
def test_a_running_reducer_can_be_asked_for_a_small_last_bucket(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    observed = Observed(DistributedDataParallel(linears(), **arguments))
    assert observed.config.small_last_bucket
    observed.assert_rebuilt_as_predicted()


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="DDP itself raises a TypeError when it broadcasts delayed parameters"
)
def test_parameters_whose_all_reduce_is_delayed_stand_in_no_bucket() -> None:
    model = linears()
    delayed = [(name, param) for name, param in model.named_parameters() if name.startswith(("1.", "2."))]
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=0.3,
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=model.get_parameter("0.weight"),
    )
    observed = Observed(ddp)
    assert observed.specs == specs_from_module(model, ignored=[name for name, _ in delayed])
    observed.assert_rebuilt_as_predicted()
    assert not {"1.weight", "2.bias"} & {spec.name for spec in observed.specs}


def test_a_first_bucket_that_the_user_tuned_is_read_from_the_ddp_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 300 * KIB)
    observed = Observed(DistributedDataParallel(linears()))
    assert observed.config.rebuilt_limits == (300 * KIB, 25 * 2**20)
    observed.assert_rebuilt_as_predicted()
