"""What ordinary code reads between graphs is ready between them: eager DDP's own reducer says where."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpopt
from ddpopt.observation.observe import observe

pytestmark = [
    pytest.mark.usefixtures("one_rank_group", "fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.*has no gradient:UserWarning"),
]
WIDTH = 16
ONE_LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20
Forward = Callable[["Scaled", Tensor], Tensor]


class Scale(nn.Module):
    """Scales columns, so many times, and is never compiled."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.times = times

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x * self.weight
        return x


class Scaled(nn.Module):
    """Four layers and a scale; the forward is given."""

    def __init__(self, forward: Forward, times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = Scale(times)
        self.inner = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self, x)

    def run(self, x: Tensor, layers: slice = slice(None)) -> Tensor:
        for layer in self.layers[layers]:
            x = layer(x).tanh()
        return x


FIRST, LAST = slice(2), slice(2, 4)


def before_all(m: Scaled, x: Tensor) -> Tensor:
    return m.run(m.scale(x))


def between_and_after(m: Scaled, x: Tensor) -> Tensor:
    return m.scale(m.run(m.scale(m.run(x, slice(1))), slice(1, 4)))  # type: ignore[no-any-return]


def between(m: Scaled, x: Tensor) -> Tensor:
    return m.run(m.scale(m.run(x, FIRST)), LAST)


def recomputed(m: Scaled, x: Tensor) -> Tensor:
    """The scale is computed once more in backward."""
    return m.run(checkpoint(m.scale, m.run(x, FIRST), use_reentrant=False), LAST)


def next_to_a_graph_that_trains_nothing(m: Scaled, x: Tensor) -> Tensor:
    return m.run(m.scale(m.scale(m.run(x, FIRST)).tanh().square() + 1), LAST)


def tied(m: Scaled, x: Tensor) -> Tensor:
    """The weight of the head is read before all layers, too, and there by no graph."""
    return m.run(m.scale(x)) * m.get_parameter("scale.weight")


class Named(torch.autograd.Function):
    """Keeps a parameter under a name that the nodes which accumulate gradients have, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: list[Tensor]) -> Tensor:
        (ctx.variable,) = parameters
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 2, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
def keeping(m: Scaled, x: Tensor) -> Any:
    return Named.apply(x, [m.layers[3].weight])  # type: ignore[no-untyped-call]


def kept_by_what_runs_between(m: Scaled, x: Tensor) -> Tensor:
    """A function keeps a parameter, which is not what its result is computed from."""
    return m.run(keeping(m, m.scale(m.run(x, FIRST))), LAST)


def rows() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def step(call: Callable[[Tensor], Tensor], ddp: DistributedDataParallel) -> list[Tensor]:
    ddp.zero_grad()
    call(rows()).square().sum().backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def ddp_of(forward: Forward, times: int) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Scaled(forward, times), bucket_cap_mb=ONE_LAYER_MB)


FORWARDS = (
    before_all, between_and_after, between, recomputed, next_to_a_graph_that_trains_nothing, tied,
    kept_by_what_runs_between,
)  # fmt: skip
LONG = 2000
"""So many operations make a chain that no recursion gets through."""


@pytest.mark.parametrize(("forward", "times"), [*((each, 1) for each in FORWARDS), (between, LONG)])
def test_buckets_are_those_of_eager_ddp_and_predicted_without_running(forward: Forward, times: int) -> None:
    ddp, eager = ddp_of(forward, times), ddp_of(forward, times)
    made = ddpopt.plan(ddp, rows(), strategy="inline")
    call = ddpopt.compile(ddp, backend="aot_eager", strategy="inline")
    with observe(ddp) as seen:
        gradients = step(call, ddp)
    torch.testing.assert_close(gradients, step(eager, eager), rtol=0, atol=0)
    with observe(eager) as rebuilt:  # in the order in which gradients came
        step(eager, eager)
    assert [bucket.params for bucket in seen.buckets] == [bucket.params for bucket in made.buckets]
    assert [{*bucket.params} for bucket in seen.buckets] == [{*bucket.params} for bucket in rebuilt.buckets]
