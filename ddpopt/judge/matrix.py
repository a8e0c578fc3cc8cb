"""The cases of the matrix, which is every mode under every option.

The cases are as small as DDP's default limits allow: more than 1 MiB of parameters, so that there are two
buckets and every mode has something to get wrong. Invariant: they are cases like those of the corpus.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import arrays, seeded

WIDTH = 512
BATCH = 8


class Plain(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Tied(Plain):
    """The first layer again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        layer: nn.Module = self.layers[0]
        result: Tensor = layer(super().forward(x))
        return result


class Normed(Plain):
    """BatchNorm after the layers: buffers, and a bias whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        hidden: Tensor = self.norm(self.layers[0](x))
        for layer in list(self.layers)[1:]:
            hidden = layer(hidden).relu()
        return hidden


class Noisy(Plain):
    """Dropout between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        return nn.functional.dropout(super().forward(x), 0.25, training=self.training)


class Mixed(Plain):
    """A last layer in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        result: Tensor = self.last(super().forward(x).to(torch.bfloat16))
        return result.float()


class Writing(Plain):
    """An activation that is changed in place, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        self.steps.add_(1)
        for layer in self.layers:
            x = layer(x)
            x[:, :2].mul_(2)
            x = x.tanh()
        return x


def _case(name: str, model: type[nn.Module], about: str) -> Case:
    return Case(
        name=name,
        model=partial(seeded, model),
        inputs=partial(arrays, shape=(BATCH, WIDTH)),
        about=about,
    )


CASES: tuple[Case, ...] = (
    _case("plain", Plain, "two linear layers"),
    _case("tied", Tied, "a layer that is used twice"),
    _case("normed", Normed, "BatchNorm, with buffers and a gradient that is zero but for rounding"),
    _case("noisy", Noisy, "dropout"),
    _case("mixed", Mixed, "two dtypes"),
    _case("writing", Writing, "an activation and a buffer that are changed in place"),
)
