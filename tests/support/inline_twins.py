"""An eager DDP module and an inline one of equal weights, that do the same and are compared bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import ddpopt
from tests.support.models import gradients_of, hand_overs, same

WIDTH = 8
LAYERS = 3
LAYER_MB = 4 * WIDTH * (WIDTH + 1) / 2**20
ALL = [f"layers.{layer}.{name}" for layer in reversed(range(LAYERS)) for name in ("bias", "weight")]
"""Parameters in the order in which their gradients complete."""
Act = Callable[[Any, DistributedDataParallel], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Twins:
    """An eager DDP module and an inline one, with equal weights."""

    def __init__(self, factory: Callable[[], nn.Module] = Net, **arguments: Any) -> None:
        torch._dynamo.reset()
        arguments = {"bucket_cap_mb": LAYER_MB, **arguments}
        self.eager, self.inline = (DistributedDataParallel(factory(), **arguments) for _ in range(2))
        self.step = ddpopt.compile(self.inline, backend="aot_eager", strategy="inline")

    @property
    def each(self) -> list[tuple[Any, DistributedDataParallel]]:
        """What to call, and the DDP module, of both."""
        return [(self.eager, self.eager), (self.step, self.inline)]

    def act(self, act: Act) -> tuple[Any, list[str]]:
        """Do the same with both, and return what came of it and whose gradients were handed over.

        What came of it, gradients, parameters and buffers are bit for bit equal.
        """
        (of_eager, of_inline), handed = self.apart(act)
        torch.testing.assert_close(numbers(of_inline), numbers(of_eager), rtol=0, atol=0)
        assert texts(of_inline) == texts(of_eager)
        return of_inline, handed

    def apart(self, act: Act) -> tuple[list[Any], list[str]]:
        """The same, but what came of it may differ: that of eager, and that of inline."""
        handed: list[str] = []
        results = []
        for call, ddp in self.each:
            ddp.zero_grad()
            with hand_overs(self.inline, handed.append):
                results.append(act(call, ddp))
        self.assert_equal()
        return results, handed

    def assert_equal(self) -> None:
        assert same([gradients_of(self.inline)], [gradients_of(self.eager)]), "gradients"
        for name, value in self.eager.state_dict().items():
            assert torch.equal(value, self.inline.state_dict()[name]), name


def numbers(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def texts(found: Any) -> list[str]:
    return [repr(leaf) for leaf in tree_leaves(found) if not isinstance(leaf, Tensor)]


def rows(seed: int = 1) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def backward(total: Tensor, **options: Any) -> None:
    torch.autograd.backward(total, **options)


def train(call: Any, ddp: DistributedDataParallel) -> None:
    backward(loss(call(rows())))
