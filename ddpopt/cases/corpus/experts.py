"""Mixtures of experts: all experts in every graph, or different experts on different ranks."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import normal, rows_case, seeded
from ddpopt.cases.corpus.layers import FeedForward


class StackedExperts(nn.Module):
    """Each token goes to its two best experts, whose weights are slices of two parameters."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, hidden) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, dim) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(tokens, dim)`` to the same shape; experts not chosen get the weight zero."""
        y = self.norm(x)
        scores = self.router(y).softmax(-1)
        best = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        hidden = F.silu(torch.einsum("td,edh->eth", y, self.up))
        return x + torch.einsum("eth,ehd,te->td", hidden, self.down, gates)


class RankExperts(nn.Module):
    """Each expert is a separate module; only those that the caller names run."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(dim, hidden) for _ in range(experts))

    def forward(self, x: Tensor, active: tuple[int, ...]) -> Tensor:
        """Map ``(tokens, dim)`` to the same shape, with the experts numbered in ``active``."""
        y = self.norm(x)
        gates = self.router(y).softmax(-1)
        for expert in active:
            x = x + gates[:, expert, None] * self.experts[expert](y)
        return x


class RankExpertsStack(nn.Module):
    """Layers of experts with a linear layer before each."""

    def __init__(self, dim: int, hidden: int, experts: int, layers: int) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))
        self.layers = nn.ModuleList(RankExperts(dim, hidden, experts) for _ in range(layers))

    def forward(self, x: Tensor, active: tuple[int, ...]) -> Tensor:
        """Map ``(tokens, dim)`` to the same shape, with the experts numbered in ``active``."""
        for mixer, layer in zip(self.mixers, self.layers, strict=True):
            x = layer(x + mixer(x), active)
        return x


class StackedExpertsStack(nn.Module):
    """Top-2 routing over experts stacked in one parameter: every expert is in every rank's graph."""

    def __init__(self, dim: int, hidden: int, experts: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StackedExperts(dim, hidden, experts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(tokens, dim)`` to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


def tokens_and_experts(rank: int, step: int, *, batch: int, width: int) -> Call:
    """Draw tokens, and leave out expert 3 on even ranks and expert 0 on odd ones."""
    return (normal(rank, step, batch, width), (1, 2, 3) if rank % 2 else (0, 1, 2)), {}


EXPERT_PARAMETERS = tuple(f"{layer}.{end}" for layer in ("up", "down") for end in ("weight", "bias"))

CASES = (
    rows_case("experts", partial(StackedExpertsStack, hidden=192, experts=6), layers=3, batch=64, dim=128),
    Case(
        name="experts_per_rank",
        model=partial(seeded, RankExpertsStack, dim=128, hidden=256, experts=4, layers=3),
        inputs=partial(tokens_and_experts, batch=64, width=128),
        about="experts unused on some ranks: the ranks' graphs differ, but all must agree on the buckets",
        ddp_kwargs={"find_unused_parameters": True},
        unused=tuple(
            f"layers.{layer}.experts.{expert}.{parameter}"
            for layer in range(3)
            for expert in (0, 3)
            for parameter in EXPERT_PARAMETERS
        ),
        ranks_differ=True,
    ),
)
