"""A model for the gate's tests, and what a test may change about it: each a regression made for real."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ddpopt.testing import Case

WIDTH = 32
LAYER_MB = 4 * WIDTH * WIDTH / 2**20


@dataclass
class Knobs:
    """What a test may change.

    Attributes:
        ddp_kwargs: DDP's arguments.
        breaks: whether the graph breaks.
        grows: whether the batch is larger in the second step.
        buffered: whether the model has a buffer, which DDP broadcasts.
        fails: whether the forward fails.
        width: of each layer.
    """

    ddp_kwargs: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": 3 * LAYER_MB})
    breaks: bool = False
    grows: bool = False
    buffered: bool = False
    fails: bool = False
    width: int = WIDTH


KNOBS = Knobs()


class Stack(nn.Module):
    """Five equal layers without biases: two buckets at a cap of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(KNOBS.width, KNOBS.width, bias=False) for _ in range(5))
        if KNOBS.buffered:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).relu()).relu()
        if KNOBS.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x).relu()
        if KNOBS.fails:
            raise ValueError("this model cannot run")
        return x


def inputs(rank: int, step: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(7 + rank + 64 * step)
    return (torch.randn(8 if KNOBS.grows and step else 4, KNOBS.width, generator=generator),), {}


def stack() -> Case:
    return Case("stack", Stack, inputs, "five equal layers", ddp_kwargs=KNOBS.ddp_kwargs)
