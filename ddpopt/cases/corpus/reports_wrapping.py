"""Public reports about the surroundings of a graph: evaluation, synchronized statistics, DDP inside DDP."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import arrays, rows_case, seeded
from ddpopt.cases.corpus.layers import Layers, residual


class UNet(nn.Module):
    """Convolutions down and up again, with a shortcut across and dropout that evaluation leaves out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, channels, 3, padding=1)
        self.deep = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 3, height, width)`` to the same shape."""
        first = self.down(x).relu()
        y = F.max_pool2d(first, 2)
        y = F.dropout(self.deep(y).relu(), 0.1, self.training)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        out: Tensor = self.last(self.up(torch.cat((y, first), dim=1)).relu())
        return out


class EvaluatedCase(Case):
    """A case that evaluates its model without gradients before every training step."""

    def step(self, model: Callable[..., Any], rank: int, step: int) -> Tensor:
        """Run one forward in evaluation mode, then one in training mode; the loss of the latter is returned.

        Args:
            model: what ``self.model()`` returned, perhaps wrapped in DDP or compiled.
            rank: the rank whose inputs are used.
            step: index of the training step, from 0.

        Returns:
            The scalar loss of the second forward.
        """
        if step > 0 and isinstance(model, nn.Module):
            model.eval()
            with torch.no_grad():
                super().step(model, rank, step)
            model.train()
        return super().step(model, rank, step)


class _Mean(torch.autograd.Function):
    """The mean over all ranks; its gradient is the mean of all ranks' gradients."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        """Return the mean; without a process group, the mean of this rank alone."""
        return _mean_over_ranks(value)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        """Return the mean of all ranks' gradients."""
        return _mean_over_ranks(gradient)


def _mean_over_ranks(value: Tensor) -> Tensor:
    if not dist.is_initialized():
        return value.clone()
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class SyncedNorm(nn.Module):
    """Like SyncBatchNorm, which torch has only for GPUs: statistics over all ranks, outside any graph."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # of torch
    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        moments: Tensor = _Mean.apply(torch.stack((x.mean(0), x.square().mean(0))))  # type: ignore[no-untyped-call]
        mean, square = moments
        out: Tensor = (x - mean) * torch.rsqrt(square - mean.square() + 1e-5) * self.weight + self.bias
        return out


class Normalized(Layers):
    """A norm that exchanges statistics between ranks, outside of the graph (pytorch#100239)."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__(dim, layers)
        self.norm = SyncedNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        before, after = self.halves()
        for layer in before:
            x = layer(x).tanh()
        x = self.norm(x)
        for layer in after:
            x = layer(x).tanh()
        return x


class Towers(nn.Module):
    """A graph after a part of the model that may have a DDP of its own (pytorch#178364)."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        x = self.inner(x)
        torch._dynamo.graph_break()
        return residual(x, self.layers)


CASES = (
    EvaluatedCase(
        name="evaluated",
        model=partial(seeded, UNet, channels=160),
        inputs=partial(arrays, shape=(2, 3, 8, 8)),
        about="evaluation without gradients between training steps (pytorch#128218)",
    ),
    rows_case("synced_norm", Normalized, layers=6, batch=8, graphs=2),
    rows_case("nested", Towers, layers=6, batch=8, graphs=2),
)
