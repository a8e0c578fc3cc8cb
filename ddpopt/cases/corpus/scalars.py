"""Numbers that are not tensors: sizes that change, floats and ints that cross cuts."""

from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import normal, rows, seeded
from ddpopt.cases.corpus.layers import Layers
from ddpopt.cases.report_of_case import Report


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
    """Blocks apart by graph breaks: one code object, compiled again for every other probability."""

    def __init__(self, dim: int, probabilities: tuple[float, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StochasticDepth(dim, probability) for probability in probabilities)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return x


class ScalarArguments(Layers):
    """A float and an int argument, and a size, are used in every layer."""

    def forward(self, x: Tensor, scale: float, shift: int) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        inverse = 1 / (shift + x.shape[0])
        for layer in self.layers:
            x = x * scale + layer(x).tanh() * inverse + shift
        return x


class DynamicBatch(Layers):
    """The batch size takes part in views, in new tensors and in arithmetic between layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        batch = x.shape[0]
        for layer in self.layers:
            y = layer(x).view(batch, 2, -1).flip(1).reshape(batch, -1)
            x = x + y.tanh() * (batch / 32) + torch.ones(batch, 1, device=x.device) / batch
        return x


def rows_and_scalars(rank: int, step: int, *, batch: int, width: int) -> Call:
    """Draw a matrix, with a float and an int that are other ones at every step."""
    return (normal(rank, step, batch, width), 1.0 - 0.125 * (step % 4), step % 4), {}


def growing_rows(rank: int, step: int, *, batch: int, width: int) -> Call:
    """Draw a matrix of one, two or three times as many rows, in turn."""
    return (normal(rank, step, batch * (step % 3 + 1), width),), {}


CASES = (
    Case(
        name="stochastic_depth",
        model=partial(seeded, StochasticDepthStack, dim=512, probabilities=(0.0, 0.1, 0.2)),
        inputs=partial(rows, batch=32, width=512),
        about="a float attribute that becomes a graph input and crosses a cut (pytorch#196227)",
        ddp_kwargs={"bucket_cap_mb": 1},
        tags=("breaks", "random", "dynamic"),
        graphs=2,
        report=Report(
            number=196227,
            upstream="a float that became a graph input and crossed a cut had no metadata: compilation "
            "failed",
            torch_passes=False,
            torch_says="raises AttributeError: 'float' object has no attribute 'meta'",
        ),
    ),
    Case(
        name="scalars",
        model=partial(seeded, ScalarArguments, dim=384, layers=8),
        inputs=partial(rows_and_scalars, batch=32, width=384),
        about="float and int arguments that change at every step, read in every layer (pytorch#134182)",
        tags=("dynamic",),
    ),
    Case(
        name="dynamic_batch",
        model=partial(seeded, DynamicBatch, dim=384, layers=8),
        inputs=partial(growing_rows, batch=16, width=384),
        about="a batch size that changes between steps and is read in every layer",
        tags=("dynamic",),
        report=Report(
            number=111636,
            upstream="a last batch of another size failed: symbolic sizes were not passed to the segments",
            torch_passes=False,
            torch_says="raises AssertionError: Node add_75 was invalid, but is output",
        ),
    ),
)
