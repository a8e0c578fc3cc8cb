"""Numbers that are not tensors: sizes that change, floats and ints that cross cuts."""

from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call
from ddpopt.cases.corpus.draws import normal, rows_case
from ddpopt.cases.corpus.layers import Layers


class StochasticDepth(nn.Module):
    """A layer that is left out for some rows; its probability is a float attribute that differs per layer."""

    def __init__(self, dim: int, probability: float) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.probability = probability

    def drop(self, x: Tensor) -> Tensor:
        """Zero whole rows with the layer's probability, and scale up the others."""
        if self.probability == 0.0:
            return x
        keep = 1.0 - self.probability
        return x * torch.rand(x.shape[0], 1, device=x.device).lt(keep) / keep

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        x = x + self.drop(self.first(x).tanh())
        return x + self.drop(self.second(x).tanh())


class StochasticDepthStack(nn.Module):
    """A float attribute that becomes a graph input and crosses a cut (pytorch#196227).

    Graph breaks separate the blocks: one code object, recompiled for every new probability.
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StochasticDepth(dim, place / 10) for place in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return x


class ScalarArguments(Layers):
    """Float and int arguments that change at every step, read in every layer (pytorch#134182)."""

    def forward(self, x: Tensor, scale: float, shift: int) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        inverse = 1 / (shift + x.shape[0])
        for layer in self.layers:
            x = x * scale + layer(x).tanh() * inverse + shift
        return x


class DynamicBatch(Layers):
    """A batch size that changes between steps and is read in every layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        batch = x.shape[0]
        for layer in self.layers:
            y = layer(x).view(batch, 2, -1).flip(1).reshape(batch, -1)
            x = x + y.tanh() * (batch / 32) + torch.ones(batch, 1, device=x.device) / batch
        return x


def rows_and_scalars(rank: int, step: int, *, batch: int, width: int) -> Call:
    """Draw a matrix, with a float and an int that change at every step."""
    return (normal(rank, step, batch, width), 1.0 - 0.125 * (step % 4), step % 4), {}


def growing_rows(rank: int, step: int, *, batch: int, width: int) -> Call:
    """Draw a matrix with one, two or three times ``batch`` rows, in turn."""
    return (normal(rank, step, batch * (step % 3 + 1), width),), {}


CASES = (
    rows_case(
        "stochastic_depth",
        StochasticDepthStack,
        layers=3,
        dim=512,
        ddp_kwargs={"bucket_cap_mb": 1},
        graphs=2,
    ),
    rows_case("scalars", ScalarArguments, inputs=partial(rows_and_scalars, batch=32, width=384)),
    rows_case("dynamic_batch", DynamicBatch, inputs=partial(growing_rows, batch=16, width=384)),
)
