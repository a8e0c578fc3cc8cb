"""Layers that several cases share: square linear layers in a row, attention, transformer blocks."""

from torch import Tensor, nn
from torch.nn import functional as F


class Layers(nn.Module):
    """Square linear layers; subclasses define how values flow between them.

    Invariant: the parameters are ``layers.0.weight``, ``layers.0.bias``, … and are drawn in this order.
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def halves(self) -> tuple[nn.ModuleList, nn.ModuleList]:
        """Return the first and the second half of the layers."""
        half = len(self.layers) // 2
        return self.layers[:half], self.layers[half:]


def residual(x: Tensor, layers: nn.ModuleList) -> Tensor:
    """Add each layer's output to the residual stream.

    Args:
        x: of shape ``(…, dim)``.
        layers: layers that map ``dim`` to ``dim``.

    Returns:
        The stream after the last layer, of the same shape.
    """
    for layer in layers:
        x = x + layer(x).tanh()
    return x


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Map ``(batch, length, dim)`` to ``(batch, heads, length, dim / heads)``."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Map ``(batch, heads, length, head_dim)`` to ``(batch, length, heads * head_dim)``."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head attention with one fused projection for query, key and value."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape; ``mask`` is true where a key may be read."""
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        out: Tensor = self.out(join_heads(mixed))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., dim)`` to the same shape."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class PreNormBlock(nn.Module):
    """Attention and a GELU feed-forward, each over a LayerNorm of the stream, to which it is added."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, causal)
        self.norm_2 = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape."""
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out
