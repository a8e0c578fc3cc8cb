"""Decoder-only transformers: GPT (learned positions, tied head), Llama (rotary, grouped queries, SwiGLU)."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import seeded, tokens
from ddpopt.cases.corpus.layers import PreNormBlock, join_heads, split_heads


class GPT(nn.Module):
    """The head multiplies by the embedding's weight, which is read first and hence complete last."""

    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.blocks = nn.ModuleList(PreNormBlock(dim, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers ``(batch, length)`` to logits ``(batch, length, vocabulary)``."""
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class RMSNorm(nn.Module):
    """Normalization by the root of the mean square, written out as Llama's reference code does."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., dim)`` to the same shape."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair ``(x[i], x[i + half])`` of the last dimension by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        head_dim = dim // heads
        self.query = nn.Linear(dim, heads * head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape; ``cos`` and ``sin`` are ``(length, head_dim)``."""
        q = rotate(split_heads(self.query(x), self.heads), cos, sin)
        k = rotate(split_heads(self.key(x), self.kv_heads), cos, sin)
        v = split_heads(self.value(x), self.kv_heads)
        share = self.heads // self.kv_heads
        k = k.repeat_interleave(share, dim=1)
        v = v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(join_heads(mixed))
        return out


class LlamaBlock(nn.Module):
    """Pre-norm block: grouped-query attention and SwiGLU, each added to the stream."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = GroupedQueryAttention(dim, heads, kv_heads)
        self.ffn_norm = RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Every block reads the same two rotary buffers, so they cross every cut."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int, length: int, dim: int, hidden: int, layers: int) -> None:
        super().__init__()
        heads = 8
        kv_heads = 2
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, hidden, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        half = dim // heads // 2
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token numbers ``(batch, length)`` to logits ``(batch, length, vocabulary)``."""
        x = self.embedding(ids)
        cos = self.cos[: ids.shape[1]]
        sin = self.sin[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def sentences(rank: int, step: int, *, vocabulary: int, batch: int, length: int) -> Call:
    """Draw one batch of token numbers as the only argument."""
    return (tokens(rank, step, vocabulary, batch, length),), {}


CASES = (
    Case(
        name="gpt",
        model=partial(seeded, GPT, vocabulary=1024, length=32, dim=128, heads=4, layers=4),
        inputs=partial(sentences, vocabulary=1024, batch=4, length=32),
        about="decoder with learned positions whose head is tied to its embedding",
    ),
    Case(
        name="llama",
        model=partial(seeded, Llama, vocabulary=512, length=32, dim=128, hidden=352, layers=4),
        inputs=partial(sentences, vocabulary=512, batch=4, length=32),
        about="decoder with RMSNorm, rotary buffers, grouped-query attention and SwiGLU",
    ),
)
