"""Public reports about the contents of a graph: constants, calls of ``forward``, operators, strides."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from ddpopt.cases.corpus.draws import arrays_case, rows_case
from ddpopt.cases.corpus.layers import Layers, join_heads, residual, split_heads
from ddpopt.cases.corpus.sharing import Residuals


class WhereScalars(Layers):
    """Tensors made of numbers between layers, torch.where(condition, 0.4, 1.0) (pytorch#92941)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer in self.layers:
            y = layer(x)
            places = torch.arange(y.shape[1], device=y.device) / y.shape[1]
            x = x + y.tanh() * torch.where(y <= 0.5, 0.4, 1.0) + places
        return x


class ForwardCalls(nn.Module):
    """Layer.forward(x) instead of layer(x), and nn.MultiheadAttention (pytorch#111279)."""

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape."""
        x = x + self.attention.forward(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = x + layer.forward(x).tanh()
        return x


class AlibiAttention(Layers):
    """Flex attention with a captured buffer, over inputs that need no gradient (pytorch#137481).

    Its scores read the buffer; it is applied to the raw inputs, between linear layers.

    Its inputs need no gradient: flex attention has no backward on the CPU.
    """

    slopes: Tensor

    def __init__(self, dim: int, heads: int, layers: int) -> None:
        super().__init__(dim, layers)
        self.heads = heads
        self.register_buffer("slopes", -torch.arange(1.0, heads + 1) / heads)
        # Outside a compiled model, torch warns if flex attention is called uncompiled.
        self.attend = torch.compile(flex_attention, backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape."""

        def alibi(score: Tensor, _batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + self.slopes[head] * (query - key)

        before, after = self.halves()
        heads = split_heads(x, self.heads)
        mixed = self.attend(heads, heads, heads, score_mod=alibi)
        return residual(residual(x, before) + join_heads(mixed), after)


class Activations(nn.Module):
    """Segments that save different activations, some of which Inductor reuses (pytorch#160745)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)
        self.last = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        x = self.first(x).sigmoid()
        x = (self.second(x).relu() * x).tanh() + x
        out: Tensor = self.last(x)
        return out


class Convs(nn.Module):
    """Convolutions whose outputs have other strides under Inductor than in eager (pytorch#113812).

    The images are contiguous, and a compiler may want the results in channels-last order.
    """

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to the same shape."""
        for layer in self.layers:
            x = layer(x).relu()
        return x


CASES = (
    rows_case("where_scalars", WhereScalars, layers=6, batch=8),
    arrays_case("forward_calls", partial(ForwardCalls, dim=320, heads=4, layers=5), (2, 4, 320)),
    arrays_case("flex_attention", partial(AlibiAttention, dim=384, heads=4, layers=6), (2, 16, 384)),
    rows_case(
        "static_twice",
        partial(Residuals, order=(0, 1, 2, 1, 3, 4, 5, 3)),
        "static_graph with modules that run twice (pytorch#109261)",
        layers=6,
        batch=8,
        ddp_kwargs={"static_graph": True},
    ),
    arrays_case("donated_buffers", partial(Activations, dim=512), (8, 512), ddp_kwargs={"bucket_cap_mb": 1}),
    arrays_case("conv_strides", partial(Convs, channels=128, layers=6), (2, 128, 6, 6)),
)
