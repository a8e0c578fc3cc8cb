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


def test_equal_gradients_are_right_bitwise() -> None:
    check = judge(lambda _layer: None)
    assert check.difference == 0.0
    assert check.gradients_right(bitwise=True)


def test_rounding_is_right_unless_bits_have_to_be_equal() -> None:
    check = judge(lambda layer: cast(None, gradient(layer).mul_(1 + 1e-7)))
    assert check.gradients_right(bitwise=False)
    assert not check.gradients_right(bitwise=True)


WRONG: dict[str, Break] = {
    "one element a little off": lambda layer: cast(None, gradient(layer)[0].mul_(1 + 1e-3)),
    "NaN": lambda layer: cast(None, gradient(layer)[0].fill_(float("nan"))),
    "missing": lambda layer: setattr(layer.bias, "grad", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_not_taken_for_rounding(name: str) -> None:
    check = judge(WRONG[name])
    assert not check.gradients_right(bitwise=False)
    assert not check.gradients_right(bitwise=True)


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


def test_the_planned_buckets_in_their_order_follow_the_plan() -> None:
    assert follows_plan(observation([("b",), ("a", "c")], [0, 1]), PLAN)


@pytest.mark.parametrize(
    ("buckets", "sent"),
    [
        ([("b", "a"), ("c",)], [0, 1]),
        ([("b",), ("a", "c")], [1, 0]),
        ([("b",), ("a", "c")], [0]),
        ([("b",), ("a", "c")], [0, 1, None]),
    ],
    ids=["other buckets", "sent in another order", "one not sent", "sent something else too"],
)
def test_anything_else_does_not_follow_the_plan(
    buckets: list[tuple[str, ...]], sent: list[int | None]
) -> None:
    assert not follows_plan(observation(buckets, sent), PLAN)
