"""The demo's judge: which gradients it takes for eager DDP's, and which it does not."""

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.judging import Check, follows_plan, worst_gradient

CHANGES: dict[str, tuple[Callable[[Tensor], Tensor | None], bool, bool]] = {
    "nothing": (lambda gradient: gradient, True, True),
    "rounding": (lambda gradient: gradient * (1 + 1e-7), True, False),
    "one element a little off": (lambda gradient: gradient * (1 + 1e-3 * torch.eye(8)[0]), False, False),
    "NaN": (lambda gradient: gradient.where(torch.eye(8)[0] == 0, float("nan")), False, False),
    "missing": (lambda _: None, False, False),
}
"""With each whether it is right, and whether it is where bits have to be equal."""


@pytest.mark.parametrize("name", CHANGES)
def test_rounding_alone_is_right_unless_bits_have_to_be_equal(name: str) -> None:
    change, right, bitwise = CHANGES[name]
    torch.manual_seed(0)
    eager, batch = nn.Linear(8, 8), torch.randn(64, 8)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    for layer in (eager, ours, exact):
        torch.autograd.backward(layer(batch.to(layer.weight.dtype)).square().mean())
    assert ours.bias.grad is not None
    ours.bias.grad = change(ours.bias.grad)
    gradients = {name: param.grad for name, param in exact.named_parameters() if param.grad is not None}
    check = Check(*worst_gradient(ours, eager, gradients), as_planned=True)
    assert (check.gradients_right(bitwise=False), check.gradients_right(bitwise=True)) == (right, bitwise)


def buckets_of(names: Sequence[str]) -> list[Any]:
    return [SimpleNamespace(params=tuple(each)) for each in names]


@pytest.mark.parametrize(
    ("buckets", "sent", "follows"),
    [
        pytest.param(("b", "ac"), [0, 1], True, id="the planned buckets in their order"),
        pytest.param(("ba", "c"), [0, 1], False, id="other buckets"),
        pytest.param(("b", "ac"), [1, 0], False, id="sent in another order"),
        pytest.param(("b", "ac"), [0], False, id="one not sent"),
        pytest.param(("b", "ac"), [0, 1, None], False, id="sent something else too"),
    ],
)
def test_the_planned_buckets_in_their_order_follow_the_plan_and_nothing_else_does(
    buckets: tuple[str, ...], sent: list[int | None], follows: bool
) -> None:
    collectives = [SimpleNamespace(bucket=index) for index in sent]
    iteration = SimpleNamespace(buckets=buckets_of(buckets), collectives=collectives)
    seen: Any = SimpleNamespace(iterations=[iteration])
    plan: Any = SimpleNamespace(buckets=buckets_of(("b", "ac")))
    assert follows_plan(seen, plan) is follows
