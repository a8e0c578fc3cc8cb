"""Steps rehearsed on fake tensors: their ready order is that of reducers that run; they leave no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from ddpopt.explanation.explain import explain
from ddpopt.testing.drawn import DrawnModel, step
from tests.support.rehearsing import WIDTH, Linears, params, rows, running_buckets

pytestmark = pytest.mark.usefixtures("one_rank_group")


def tied() -> nn.Module:
    model = Linears(layers=6, order=(0, 1, 2, 3, 1, 4, 5))
    model.layers[5].weight = model.layers[0].weight
    return model


def skips_a_layer() -> nn.Module:
    return Linears(layers=4, order=(0, 1, 3))


BROKEN = (step("graph_break"), step("linear"), step("graph_break"), step("double_linear"))
TWO_DTYPES = DrawnModel(BROKEN * 2, width=WIDTH).program.model
ROWS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "static graph, unused parameters": (skips_a_layer, {"bucket_cap_mb": 0.07, "static_graph": True}),
    "tied and read twice": (tied, {"bucket_cap_mb": 0.1}),
    "two dtypes and graph breaks": (TWO_DTYPES, {"bucket_cap_mb": 0.1}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_running_reducer_has_the_buckets_that_eager_training_is_said_to_have(row: str) -> None:
    make, ddp_kwargs = ROWS[row]
    ddp = DistributedDataParallel(make(), **ddp_kwargs)
    predicted = params(explain(ddp, rows()).ddp.buckets)
    assert predicted == running_buckets(ddp, ddp, rows())
    assert len(predicted) > 1


def test_a_ddp_module_and_its_arguments_are_explained_alike_whatever_the_callers_gradient_mode() -> None:
    ddp = DistributedDataParallel(Linears(), bucket_cap_mb=0.07)
    with torch.no_grad():
        assert explain(ddp, rows()) == explain(Linears(), rows(), bucket_cap_mb=0.07)


class Counting(nn.Module):
    """Counts its calls in a buffer, draws random numbers, and on request has a backward that fails."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.refuses = refuses
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = nn.functional.dropout(self.linear(x))
        if self.refuses:
            y.register_hook(_refuse)  # type: ignore[no-untyped-call]  # of torch
        return y


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError(f"no gradient of {tuple(gradient.shape)} here")


def test_the_model_and_the_default_generator_are_left_as_they_were() -> None:
    model = Counting()
    before = torch.random.get_rng_state()
    explain(model, torch.ones(2, 8))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.calls == 0
    assert [param.grad for param in model.parameters()] == [None, None]
    assert model.linear.weight._post_accumulate_grad_hooks is None


def test_fake_parameters_of_the_caller_keep_their_gradients() -> None:
    with FakeTensorMode():
        model, x = nn.Linear(8, 8), torch.ones(2, 8)
        model.weight.grad = gradient = torch.ones(8, 8)
    explain(model, x)
    assert model.weight.grad is gradient
    assert model.bias.grad is None
    assert not model.weight._post_accumulate_grad_hooks


def test_a_backward_that_fails_on_fake_tensors_leaves_the_plan_and_says_so() -> None:
    explanation = explain(Counting(refuses=True), torch.ones(2, 8))
    assert explanation.ddp.note == (
        "ready order taken from ddpopt's plan: eager backward fails on fake tensors "
        "(no gradient of (2, 8) here)"
    )
    assert params(explanation.ddp.buckets) == [bucket.params for bucket in explanation.plan.buckets]
