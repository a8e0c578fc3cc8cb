"""A model that somebody trains with DDP."""

from torch import Tensor, nn

__all__ = ["TinyNet"]


class TinyNet(nn.Module):
    """Two layers, and a scale that both share."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.scale = nn.Parameter(self.first.weight.new_ones(width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second((self.first(x) * self.scale).relu()) * self.scale
        return out
