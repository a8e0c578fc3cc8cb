"""A GPT-like model whose layers, embedding and head all have the same size."""

import torch
from torch import nn


class Layer(nn.Module):
    """A pre-norm transformer layer with learned norms and biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 4
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend and transform: map (batch, tokens, width) to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, tokens, width))
        mixed: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return mixed


class GptLike(nn.Module):
    """Embedding, layers and head, each of exactly the same number of bytes.

    A cap of that size therefore closes one bucket per layer, at the layer's first operation.
    """

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.layer_bytes = sum(p.numel() * p.element_size() for p in self.layers[0].parameters())
        vocabulary = self.layer_bytes // (4 * width)
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers (batch, tokens) to logits (batch, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
