"""Transformers with an encoder: BERT (post-norm, padding mask), T5 (relative positions, cross-attention)."""

from functools import partial
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpopt.cases.case import Call, Case
from ddpopt.cases.corpus.draws import seeded, tokens
from ddpopt.cases.corpus.layers import FeedForward, SelfAttention, join_heads, split_heads


class BERTBlock(nn.Module):
    """Post-norm block: attention under a padding mask, then a GELU feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(dim, heads)
        self.norm_1 = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim, 4 * dim)
        self.norm_2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape; ``mask`` is true where a key may be read."""
        x = self.norm_1(x + self.attention(x, mask))
        out: Tensor = self.norm_2(x + self.feed_forward(x))
        return out


class BERT(nn.Module):
    """Masked-language model that computes its own loss, as models of the transformers library do."""

    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.kinds = nn.Embedding(2, dim)
        nn.init.normal_(self.words.weight, std=0.05)
        self.norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(BERTBlock(dim, heads) for _ in range(layers))
        self.transform = nn.Linear(dim, dim)
        self.head_norm = nn.LayerNorm(dim)
        self.head_bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(
        self, ids: Tensor, kinds: Tensor, attention_mask: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Map four ``(batch, length)`` tensors to ``loss`` and ``logits``; the mask is 1 at real tokens."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.positions(positions) + self.kinds(kinds))
        mask = attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, mask)
        x = self.head_norm(F.gelu(self.transform(x)))
        logits = F.linear(x, self.words.weight, self.head_bias)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class T5Attention(nn.Module):
    """Attention without biases over any memory, with a relative position bias that is passed in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape; ``bias`` is added to the scores."""
        q = split_heads(self.query(x), self.heads)
        k = split_heads(self.key(memory), self.heads)
        v = split_heads(self.value(memory), self.heads)
        out: Tensor = self.out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
        return out


class T5Block(nn.Module):
    """Pre-norm block; a decoder's block attends to the encoder's output too."""

    def __init__(self, dim: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(dim)
        self.attention = T5Attention(dim, heads)
        self.cross = T5Attention(dim, heads) if decoder else None
        self.norm_2 = nn.RMSNorm(dim) if decoder else None
        self.norm_3 = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        """Map ``(batch, length, dim)`` to the same shape."""
        y = self.norm_1(x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and self.norm_2 is not None and memory is not None:
            x = x + self.cross(self.norm_2(x), memory, None)
        out: Tensor = x + self.feed_forward(self.norm_3(x))
        return out


class T5(nn.Module):
    """One weight embeds the source, embeds the target and is the head."""

    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.shared.weight, std=0.05)
        self.target = nn.Embedding(vocabulary, dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.target.weight = self.head.weight = self.shared.weight
        self.distances = nn.Embedding(2 * length - 1, heads)
        self.encoder = nn.ModuleList(T5Block(dim, heads, decoder=False) for _ in range(layers))
        self.decoder = nn.ModuleList(T5Block(dim, heads, decoder=True) for _ in range(layers))
        self.encoder_norm = nn.RMSNorm(dim)
        self.decoder_norm = nn.RMSNorm(dim)

    def bias(self, length: int, causal: bool) -> Tensor:
        """Return the bias for the scores: ``(1, heads, length, length)``, minus infinity for the future."""
        places = torch.arange(length, device=self.distances.weight.device)
        distance = places[None, :] - places[:, None]
        bias: Tensor = self.distances(distance + length - 1).permute(2, 0, 1).unsqueeze(0)
        return bias.masked_fill(distance > 0, float("-inf")) if causal else bias

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map token numbers, both ``(batch, length)``, to logits ``(batch, length, vocabulary)``."""
        memory = self.shared(source)
        bias = self.bias(source.shape[1], causal=False)
        for block in self.encoder:
            memory = block(memory, bias, None)
        memory = self.encoder_norm(memory)
        x = self.target(target)
        bias = self.bias(target.shape[1], causal=True)
        for block in self.decoder:
            x = block(x, bias, memory)
        logits: Tensor = self.head(self.decoder_norm(x))
        return logits


def masked_sentences(rank: int, step: int, *, vocabulary: int, batch: int, length: int) -> Call:
    """Draw padded sentences with their kinds, mask and labels, all by keyword."""
    ids = tokens(rank, step, vocabulary, batch, length)
    lengths = length - torch.arange(batch)[:, None]
    mask = (torch.arange(length)[None, :] < lengths).long()
    return (), {"ids": ids, "kinds": ids % 2, "attention_mask": mask, "labels": ids.roll(1, dims=1)}


def sentence_pairs(rank: int, step: int, *, vocabulary: int, batch: int, length: int) -> Call:
    """Draw sources and targets as two arguments."""
    return tuple(tokens(rank, step, vocabulary, 2, batch, length).unbind(0)), {}


CASES = (
    Case(
        name="bert",
        model=partial(seeded, BERT, vocabulary=512, length=32, dim=128, heads=4, layers=4),
        inputs=partial(masked_sentences, vocabulary=512, batch=4, length=32),
        loss=itemgetter("loss"),
        about="encoder with padding mask, inputs by keyword, a tied head with its own bias, a dict as output",
    ),
    Case(
        name="t5",
        model=partial(seeded, T5, vocabulary=512, length=24, dim=112, heads=4, layers=3),
        inputs=partial(sentence_pairs, vocabulary=512, batch=4, length=24),
        about="encoder-decoder: three-way tied weight, one position bias for a whole stack, cross-attention",
    ),
)
