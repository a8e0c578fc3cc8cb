"""The demo's judge: which gradients it takes for eager DDP's, and which it does not."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from examples.judging import Check, worst_gradient

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
