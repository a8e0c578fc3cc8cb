"""The cases of the matrix, which is every mode under every option.

The cases are as small as DDP's default limits allow: more than 1 MiB of parameters, so that there are two
buckets for every mode to handle. Invariant: they meet the rules of the corpus.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import arrays, seeded

WIDTH = 512
BATCH = 8


class Plain(nn.Module):
    """Two linear layers, with a module between them and one after them."""

    def __init__(
        self, between: Callable[[], nn.Module] = nn.ReLU, after: Callable[[], nn.Module] = nn.Identity
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.between = between()
        self.after = after()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        first, last = self.layers
        result: Tensor = self.after(last(self.between(first(x))).relu())
        return result


class Tied(Plain):
    """Applies the first layer again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        first: nn.Module = self.layers[0]
        result: Tensor = first(super().forward(x))
        return result


class Half(nn.Linear):
    """A layer that computes in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to the same shape."""
        return super().forward(x.to(torch.bfloat16)).float()


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


def _case(name: str, model: Callable[[], nn.Module], about: str) -> Case:
    return Case(name, partial(seeded, model), partial(arrays, shape=(BATCH, WIDTH)), about)


NORM = partial(nn.BatchNorm1d, WIDTH)
HALF = partial(Half, WIDTH, WIDTH, dtype=torch.bfloat16)
NORMED = "BatchNorm, with buffers and a gradient that is zero except for rounding"
CASES: tuple[Case, ...] = (
    _case("plain", Plain, "two linear layers"),
    _case("tied", Tied, "a layer that is used twice"),
    _case("normed", partial(Plain, between=NORM), NORMED),
    _case("noisy", partial(Plain, after=partial(nn.Dropout, 0.25)), "dropout"),
    _case("mixed", partial(Plain, after=HALF), "two dtypes"),
    _case("writing", Writing, "an activation and a buffer that are changed in place"),
)
