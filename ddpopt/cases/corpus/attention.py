"""Attention and feed-forward layers that several transformers of the corpus share."""

from torch import Tensor, nn
from torch.nn import functional as F


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
        self.heads, self.causal = heads, causal
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
