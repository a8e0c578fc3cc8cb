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
    """Four layers, and a scale in front of some of them or behind all."""

    def __init__(self, places: tuple[int, ...], times: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = Scale(times)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = a(self.scaled(0, x)).tanh()  # no loop: Dynamo leaves one with a break in it to Python
        x = b(self.scaled(1, x)).tanh()
        x = c(self.scaled(2, x)).tanh()
        x = d(self.scaled(3, x)).tanh()
        return self.scaled(4, x)

    def scaled(self, place: int, x: Tensor) -> Tensor:
        output: Tensor = self.scale(x) if place in self.places else x
        return output


class Recomputed(Scaled):
    """The scale in front of the third layer is computed once more in backward."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = checkpoint(self.scale, b(a(x).tanh()).tanh(), use_reentrant=False)
        return d(c(x).tanh()).tanh()  # type: ignore[no-any-return]


class Paramless(Scaled):
    """A graph that trains nothing stands between two scales."""

    def __init__(self) -> None:
        super().__init__(())
        self.other = Scale()

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = self.other(self.scale(b(a(x).tanh()).tanh()).tanh().square() + 1)
        return d(c(x).tanh()).tanh()  # type: ignore[no-any-return]


class Tied(Scaled):
    """The weight of the head is read in front of all layers, too, and there by no graph."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = d(c(b(a(self.scale(x)).tanh()).tanh()).tanh()).tanh()
        return x * self.get_parameter("scale.weight")


class Named(torch.autograd.Function):
    """Keeps a parameter under a name that the nodes which accumulate gradients have, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: list[Tensor]) -> Tensor:
        (ctx.variable,) = parameters
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * 2, None


class Kept(Scaled):
    """Between graphs a function keeps a parameter, which is not what its result is computed from."""

    def scaled(self, place: int, x: Tensor) -> Tensor:
        return self.keeping(super().scaled(place, x)) if place in self.places else x

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
    def keeping(self, x: Tensor) -> Tensor:
        output: Tensor = Named.apply(x, [self.layers[3].weight])  # type: ignore[no-untyped-call]
        return output


def rows() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def step(call: Callable[[Tensor], Tensor], ddp: DistributedDataParallel) -> list[Tensor]:
    ddp.zero_grad()
    call(rows()).square().sum().backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def ddp_of(model: Callable[[], nn.Module]) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(model(), bucket_cap_mb=ONE_LAYER_MB)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in front of all": lambda: Scaled((0,)),
    "between and behind": lambda: Scaled((1, 4)),
    "recomputed": lambda: Recomputed(()),
    "beside a graph that trains nothing": Paramless,
    "tied": lambda: Tied(()),
    "between, by a chain that no recursion gets through": lambda: Scaled((2,), times=2000),
    "kept by what runs between": lambda: Kept((2,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_those_of_eager_ddp_and_predicted_without_running(name: str) -> None:
    model = MODELS[name]
    ddp, eager = ddp_of(model), ddp_of(model)
    made = ddpopt.plan(ddp, rows(), strategy="inline")
    call = ddpopt.compile(ddp, backend="aot_eager", strategy="inline")
    with observe(ddp) as seen:
        gradients = step(call, ddp)
    torch.testing.assert_close(gradients, step(eager, eager), rtol=0, atol=0)
    with observe(eager) as rebuilt:  # in the order in which gradients came
        step(eager, eager)
    assert [bucket.params for bucket in seen.buckets] == [bucket.params for bucket in made.buckets]
    assert [{*bucket.params} for bucket in seen.buckets] == [{*bucket.params} for bucket in rebuilt.buckets]
