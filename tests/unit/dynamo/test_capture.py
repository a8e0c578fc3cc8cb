"""Planning a model reads it off fake tensors: nothing runs, nothing is copied, nothing is left behind."""

import copy
import copyreg
import inspect
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.planning.plan import Plan
from tests.support.refusals import refusal
from tests.support.rehearsing import Broken, rows

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WIDTH = 128
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
LAYER_MB = LAYER_BYTES / 2**20


class Net(nn.Module):
    """Three layers, batch norm, dropout, and an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: Tensor, layers: int = 3) -> Tensor:
        for layer in list(self.layers)[:layers]:
            x = nn.functional.dropout(self.norm(layer(x)), 0.5, self.training)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def planned(model: nn.Module | None = None, **kwargs: Any) -> Plan:
    given = net() if model is None else model
    return ddpopt.plan(given, rows(), strategy="split", bucket_cap_mb=LAYER_MB, **kwargs)


# ------------------------------------------------------------------------------------- what is planned


def test_all_other_keywords_go_to_the_models_forward() -> None:
    assert planned(layers=2).unread == ("layers.2.weight", "layers.2.bias")


def test_a_compiled_module_is_planned_under_the_names_that_ddp_sees() -> None:
    plan = planned(torch.compile(net()))  # type: ignore[arg-type]  # torch.compile gives a module for one
    assert plan.buckets[0].params == ("_orig_mod.layers.2.bias", "_orig_mod.layers.2.weight")
    assert plan.unread == ()


# ---------------------------------------------------------------------------------- under which conditions


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_model_without_memory_is_planned_on_inputs_with_and_without(mode: Callable[[], Any]) -> None:
    with (entered := mode()):
        model, inputs = Net(), rows()
    expected = [(b.params, b.nbytes, b.segment) for b in planned().buckets]
    for given in (rows(), inputs):
        plan = ddpopt.plan(model, given, strategy="split", bucket_cap_mb=LAYER_MB)
        assert [(b.params, b.nbytes, b.segment) for b in plan.buckets] == expected
    with entered:
        assert ddpopt.plan(model, inputs, strategy="split", bucket_cap_mb=LAYER_MB) == plan


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_is_one_for_training_whatever_the_grad_mode(mode: Callable[[], Any]) -> None:
    model, inputs, expected = net(), rows(), planned()
    with mode():
        assert ddpopt.plan(model, inputs, strategy="split", bucket_cap_mb=LAYER_MB) == expected


@pytest.mark.usefixtures("one_rank_group")
def test_options_beside_those_of_a_ddp_module_are_refused() -> None:
    ddp = DistributedDataParallel(net())
    assert refusal(lambda: ddpopt.plan(ddp, rows(), static_graph=True, bucket_cap_mb=1)) == (
        "do not pass 'bucket_cap_mb', 'static_graph' with a DDP module; it already has its options. "
        "Leave them out, or pass the module inside (ddp.module)"
    )


# --------------------------------------------------------------------------------------------- errors


def test_an_invalid_module_or_strategy_is_rejected() -> None:
    no_module = refusal(lambda: ddpopt.plan(cast(Any, torch.relu), rows()))
    assert no_module.startswith("model: expected a torch.nn.Module, got <built-in method relu")
    assert refusal(lambda: ddpopt.plan(net(), rows(), strategy=cast(Any, "splits"))) == (
        "strategy: expected 'split', 'inline' or 'auto', got 'splits'"
    )


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((), "TypeError: Net.forward() missing 1 required positional argument: 'x'"),
        ((torch.ones(2, 7),), "RuntimeError: a and b must have same reduction dim"),
        (([1, 2],), "TypeError: linear(): argument 'input' (position 1) must be Tensor, not list"),
    ],
)
def test_a_model_that_cannot_run_is_refused_with_its_own_error_and_what_its_forward_takes_and_got(
    inputs: tuple[Any, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in inputs)
    got = f"({fakes}, {{}})".replace("FakeTensor(..., ", "Tensor(")
    for model in (net(), DistributedDataParallel(net())):
        first, takes, check = refusal(partial(ddpopt.plan, model, *inputs)).splitlines()
        assert first.startswith(f"model: Net could not be traced on fake tensors: {said}")
        assert takes == f"Its forward takes {inspect.signature(net().forward)}, and got {got}."
        assert check == "Check that model(*inputs) runs in eager."
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_model_may_keep_an_autograd_node_so_that_its_hooks_live() -> None:
    model = net()
    model.__dict__["kept"] = node = get_gradient_edge(model.layers[0].get_parameter("weight")).node
    assert planned(model) == planned(net())
    assert type(node) not in copyreg.dispatch_table


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = net()
    model.__dict__["lock"] = threading.Lock()
    assert refusal(lambda: ddpopt.plan(model, rows())) == (
        "model: Net could not be copied: cannot pickle '_thread.lock' object\n"
        "Give the object that cannot be copied a __deepcopy__, or attach it after planning."
    )


# ------------------------------------------------------------------------------------ nothing left behind


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model, generator = net(), torch.random.get_rng_state()
    model.layers[0].get_parameter("weight").grad = torch.ones(WIDTH, WIDTH)
    before, identities = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    planned(model)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert not torch.distributed.is_initialized()
    assert [parameter.grad is not None for parameter in model.parameters()] == [True] + [False] * 5


def test_no_weight_is_copied() -> None:
    model, inputs = net(), rows()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        ddpopt.plan(model, inputs, strategy="split", bucket_cap_mb=LAYER_MB)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert allocated < LAYER_BYTES


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch counts recompilations of a frame together, whoever asked for them",
)
def test_the_callers_own_compilations_find_their_limits_untouched() -> None:
    model, counter = Broken(WIDTH, 2), CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            ddpopt.plan(model, rows())
        torch.compile(model, backend=counter)(rows())
    assert counter.frame_count == 2


def test_dynamos_settings_stay_as_they_were_also_when_tracing_fails() -> None:
    before = torch._dynamo.config.get_config_copy()
    planned()
    refusal(lambda: ddpopt.plan(net()))
    assert torch._dynamo.config.get_config_copy() == before
