"""Public reports about sizes: sequences that grow, batches that change or differ between ranks."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import normal, seeded
from ddpopt.cases.corpus.layers import Layers, residual


class PointwiseConv(nn.Conv2d):
    """A 1 x 1 convolution that becomes a matrix product where its input is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, inputs, height, width)`` to ``(batch, outputs, height, width)``."""
        if x.is_contiguous():
            return super().forward(x)
        return F.linear(x.permute(0, 2, 3, 1), self.weight.flatten(1)).permute(0, 3, 1, 2)


class CheckpointedConvs(nn.Module):
    """Pairs of 1 x 1 convolutions, each recomputed in backward, over images of any size."""

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        # Without biases: the order in which their gradients are summed depends on layouts, which cuts change.
        self.layers = nn.ModuleList(PointwiseConv(channels, channels, 1, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to the same shape."""
        for layer in self.layers:
            x = x.transpose(2, 3) + checkpoint(layer, x.transpose(2, 3), use_reentrant=False).tanh()
        return x


class TransposedLinears(nn.Module):
    """Linear layers over the transposed input, then one over all of it at once."""

    def __init__(self, length: int, dim: int, layers: int) -> None:
        super().__init__()
        # Without biases: the order in which their gradients are summed depends on layouts, which cuts change.
        self.layers = nn.ModuleList(nn.Linear(length, length, bias=False) for _ in range(layers))
        self.last = nn.Linear(length * dim, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to ``(batch, 8)``."""
        x = residual(torch.transpose(x, 2, 1), self.layers)
        out: Tensor = self.last(x.flatten(1))
        return out


class Rows(Layers):
    """Linear layers over any number of rows, or of sequences of any length."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, …, dim)`` to the same shape."""
        for layer in self.layers:
            x = x + layer(x).tanh() / x.shape[0]
        return x


def growing_sequences(rank: int, step: int, *, width: int) -> Call:
    """Draw two sequences that are two longer at every step."""
    return (normal(rank, step, 2, 8 + 2 * step, width),), {}


def growing_images(rank: int, step: int, *, channels: int) -> Call:
    """Draw images that are wider and taller at every other step."""
    side = 3 + step % 2
    return (normal(rank, step, 2, channels, side, side + 1),), {}


def doubled_batches(rank: int, step: int, *, length: int, width: int) -> Call:
    """Draw four sequences at the first step and eight later."""
    return (normal(rank, step, 8 if step else 4, length, width),), {}


def uneven_rows(rank: int, step: int, *, width: int) -> Call:
    """Draw eight rows; from the second step on, odd ranks draw different numbers of rows."""
    return (normal(rank, step, 8 + 3 * step * (rank % 2), width),), {}


CASES = (
    Case(
        name="growing_length",
        model=partial(seeded, Rows, dim=512, layers=3),
        inputs=partial(growing_sequences, width=512),
        about="sequences that grow at every step: sizes stay symbolic across cuts (pytorch#140229)",
        ddp_kwargs={"bucket_cap_mb": 1},
    ),
    Case(
        name="checkpoint_sizes",
        model=partial(seeded, CheckpointedConvs, channels=384, layers=6),
        inputs=partial(growing_images, channels=384),
        about="checkpointed 1 x 1 convolutions over images of changing size and stride (pytorch#118984)",
    ),
    Case(
        name="transposed_batch",
        model=partial(seeded, TransposedLinears, length=384, dim=8, layers=6),
        inputs=partial(doubled_batches, length=384, width=8),
        about="a transposed value across cuts, and a batch size that doubles after a step (pytorch#116292)",
    ),
    Case(
        name="uneven_ranks",
        model=partial(seeded, Rows, dim=384, layers=6),
        inputs=partial(uneven_rows, width=384),
        about="a batch size that changes on odd ranks only: only these recompile (pytorch#130935)",
        ranks_differ=True,
    ),
)
