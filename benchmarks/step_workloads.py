"""The models that `benchmarks.step` trains.

Two that torch's DDPOptimizer splits about where DDP's buckets end, and three where it does not:

- ``keyword``: weights passed by keyword. It checks only positional arguments, sees no parameter, and splits
  nothing.
- ``experts``: weights inside a list argument, as with stacked experts. It sees only the routers.
- ``tied``: a GPT whose head is the embedding, at DDP's default cap. It counts the tied weight at the head, so
  its first segment ends there; the first bucket's gradients are all in the second and last segment.

Batch sizes make computation and all-reduce at 1 Gbit/s take similar times; otherwise there is little to hide,
or little to hide it behind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpt import GptLike

MIB = 2**20


@dataclass(frozen=True)
class Workload:
    """A model and its training data.

    Attributes:
        about: a description of the model.
        build: makes the model.
        inputs: makes a batch.
        cap_bytes: DDP's bucket cap; None leaves it to DDP.
    """

    about: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    cap_bytes: Callable[[nn.Module], int | None]


class Linears(nn.Module):
    """Linear layers without anything between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class KeywordLinears(Linears):
    """Linear layers whose weights are passed by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = functional.linear(x, weight=layer.weight, bias=layer.bias)
        return x


class Experts(nn.Module):
    """A layer of linear experts, stacked into one product; a router weights their outputs."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.weights = nn.ParameterList(torch.randn(width, width) / width for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        weights = torch.stack(list(self.weights))
        shares = self.router(x).softmax(-1).t().unsqueeze(-1)
        said: Tensor = (x.expand(len(weights), *x.shape) @ weights * shares).sum(0)
        return x + said


class MixtureOfExperts(nn.Module):
    """Layers of experts."""

    def __init__(self, layers: int, experts: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class TiedGpt(GptLike):
    """A GPT whose head is its embedding."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self.head.weight = self.embedding.weight


def _layer_bytes(model: nn.Module) -> int:
    assert isinstance(model, GptLike)
    return model.layer_bytes


WORKLOADS: Mapping[str, Workload] = {
    "linears": Workload(
        "8 x Linear(1024), batch 128, cap 4 MiB",
        lambda: Linears(8, 1024),
        lambda: torch.randn(128, 1024),
        lambda _: 4 * MIB,
    ),
    "gpt": Workload(
        "GPT, 4 layers of width 256, batch 4 x 128 tokens, a bucket a layer",
        lambda: GptLike(4, 256),
        lambda: torch.randint(0, 3000, (4, 128)),
        _layer_bytes,
    ),
    "keyword": Workload(
        "8 x linear(x, weight=w) of width 1024, batch 256, cap 4 MiB",
        lambda: KeywordLinears(8, 1024),
        lambda: torch.randn(256, 1024),
        lambda _: 4 * MIB,
    ),
    "experts": Workload(
        "8 layers of 4 stacked experts of width 512, batch 256, cap 4 MiB",
        lambda: MixtureOfExperts(8, 4, 512),
        lambda: torch.randn(256, 512),
        lambda _: 4 * MIB,
    ),
    "tied": Workload(
        "GPT, 2 layers of width 512, head tied to the embedding, batch 2 x 128 tokens, DDP's default cap",
        lambda: TiedGpt(2, 512),
        lambda: torch.randint(0, 6000, (2, 128)),
        lambda _: None,
    ),
}
"""The models, by their names on the command line."""
