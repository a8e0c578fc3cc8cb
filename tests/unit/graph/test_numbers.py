"""Numbers that become tensors."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ddpopt.errors import UnsupportedError
from ddpopt.graph.numbers import numbers_as_tensors

aten: Any = torch.ops.aten
OPERATIONS: dict[str, Callable[[float, Tensor, Tensor], Any]] = {
    "mul": lambda rate, a, b: a * rate * 0.1 + b,
    "div": lambda rate, a, b: a / rate - b,
    "rsub": lambda rate, a, b: (rate - a) * b,
    "pow": lambda rate, a, b: (a**rate, rate**b),
    "clamp": lambda rate, a, _: torch.where(a > rate, a, rate),
    "masked": lambda rate, a, b: a.masked_fill(a < b, rate),
    "alpha, in place": lambda rate, a, b: a.clone().sub_(b, alpha=rate),
    "addcdiv": lambda rate, a, b: a.addcdiv(b, a, value=rate),
    "addcmul, in place": lambda rate, a, b: a.clone().addcmul_(b, a, value=rate),
    "lerp, in place": lambda rate, a, b: a.clone().lerp_(b, 1 - rate),
    "full": lambda rate, a, b: (torch.full_like(a, rate) + b, torch.full((2,), rate), torch.tensor(rate)),
    "new full": lambda rate, a, _: a.new_full((2,), rate),
    "functions": lambda rate, a, _: a * math.sqrt(rate) * round(rate, 1) * min(rate, 0.2) * max(0.1, rate),
    "integers": lambda rate, a, _: (
        a * int(rate * 10) + math.floor(rate * 20) + round(rate) + float(rate // 0.2)
    ),
    "foreach": lambda rate, a, b: torch._foreach_mul([a, b], rate),
    "foreach, in place": lambda rate, a, b: in_place(torch._foreach_add_, a, b, alpha=rate),
    "foreach lerp": lambda rate, a, b: in_place(torch._foreach_lerp_, a, b, weight=rate),
    "foreach addcdiv": lambda rate, a, b: in_place(torch._foreach_addcdiv_, a, b, [a + 1], value=rate),
    "foreach pow": lambda rate, a, b: torch._foreach_pow([a, b], rate),
}


def in_place(operation: Any, a: Tensor, b: Tensor, *more: Any, **given: Any) -> Tensor:
    written = a.clone()
    operation([written], [b], *more, **given)
    return written


@pytest.mark.parametrize("form", [(torch.float32, (3,)), (torch.float32, ()), (torch.bfloat16, (2, 2))])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_become_tensors_and_the_graph_computes_the_same(name: str, form: Any) -> None:
    def step(given: Tensor, a: Tensor, b: Tensor) -> Any:
        return OPERATIONS[name](given.item(), a, b)

    dtype, shape = form
    torch.manual_seed(0)
    inputs = torch.tensor(0.3, dtype=torch.float64), *(torch.rand(2, *shape) + 0.5).to(dtype)
    gm = make_fx(step, tracing_mode="symbolic")(*inputs)
    numbers_as_tensors(gm.graph)
    gm.recompile()
    gm.graph.lint()
    assert not gm.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    torch.testing.assert_close(gm(*inputs), step(*inputs))


def test_an_operation_that_takes_numbers_only_says_what_to_do() -> None:
    gm = make_fx(lambda rate, a: torch.nn.functional.leaky_relu(a, rate.item()), tracing_mode="symbolic")(
        torch.tensor(0.3, dtype=torch.float64), torch.rand(3)
    )
    numbers_as_tensors(gm.graph)
    gm.recompile()
    with pytest.raises(UnsupportedError, match=r"leaky_relu.* takes a number that changes.*make the num"):
        gm(torch.tensor(0.3, dtype=torch.float64), torch.rand(3))
