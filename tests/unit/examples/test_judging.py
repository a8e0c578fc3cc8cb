"""The demo's judge: which gradients it takes for eager DDP's, and which it does not."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from examples.judging import Check, follows_plan, worst_gradient

Break = Callable[[nn.Linear], None]


def linear_with_gradients() -> tuple[nn.Linear, dict[str, Tensor]]:
    """Make a layer with float32 gradients, and the exact ones."""
    torch.manual_seed(0)
    layer, batch = nn.Linear(8, 8), torch.randn(64, 8)
    exact = copy.deepcopy(layer).double()
    torch.autograd.backward(layer(batch).square().mean())
    torch.autograd.backward(exact(batch.double()).square().mean())
    return layer, {name: param.grad for name, param in exact.named_parameters() if param.grad is not None}


def gradient(layer: nn.Linear) -> Tensor:
    assert layer.bias.grad is not None
    return layer.bias.grad


def judge(change: Break) -> Check:
    """Judge a copy whose gradients were changed."""
    eager, exact = linear_with_gradients()
    ours, _ = linear_with_gradients()
    change(ours)
    return Check(*worst_gradient(ours, eager, exact), as_planned=True)


CHANGES: dict[str, tuple[Break, bool, bool]] = {
    "nothing": (lambda _layer: None, True, True),
    "rounding": (lambda layer: cast(None, gradient(layer).mul_(1 + 1e-7)), True, False),
    "one element a little off": (lambda layer: cast(None, gradient(layer)[0].mul_(1 + 1e-3)), False, False),
    "NaN": (lambda layer: cast(None, gradient(layer)[0].fill_(float("nan"))), False, False),
    "missing": (lambda layer: setattr(layer.bias, "grad", None), False, False),
}
"""With each whether it is right, and whether it is where bits have to be equal."""


@pytest.mark.parametrize("name", CHANGES)
def test_rounding_alone_is_right_unless_bits_have_to_be_equal(name: str) -> None:
    change, right, bitwise = CHANGES[name]
    check = judge(change)
    assert (check.gradients_right(bitwise=False), check.gradients_right(bitwise=True)) == (right, bitwise)


def observation(buckets: list[tuple[str, ...]], sent: list[int | None]) -> Any:
    """Make what `ddpopt.observe` gives after one iteration."""
    return SimpleNamespace(
        iterations=(
            SimpleNamespace(
                buckets=tuple(SimpleNamespace(params=params) for params in buckets),
                collectives=tuple(SimpleNamespace(bucket=index) for index in sent),
            ),
        )
    )


PLAN: Any = SimpleNamespace(buckets=[SimpleNamespace(params=("b",)), SimpleNamespace(params=("a", "c"))])


@pytest.mark.parametrize(
    ("buckets", "sent", "follows"),
    [
        pytest.param([("b",), ("a", "c")], [0, 1], True, id="the planned buckets in their order"),
        pytest.param([("b", "a"), ("c",)], [0, 1], False, id="other buckets"),
        pytest.param([("b",), ("a", "c")], [1, 0], False, id="sent in another order"),
        pytest.param([("b",), ("a", "c")], [0], False, id="one not sent"),
        pytest.param([("b",), ("a", "c")], [0, 1, None], False, id="sent something else too"),
    ],
)
def test_the_planned_buckets_in_their_order_follow_the_plan_and_nothing_else_does(
    buckets: list[tuple[str, ...]], sent: list[int | None], follows: bool
) -> None:
    assert follows_plan(observation(buckets, sent), PLAN) is follows
