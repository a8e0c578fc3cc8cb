"""A small GPT-2 of the transformers library, without a download: for ddpopt verify."""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=64, use_cache=False)
    tokens = torch.randint(0, config.vocab_size, (4, 32))
    model: nn.Module = GPT2LMHeadModel(config)
    return model, {"input_ids": tokens, "labels": tokens}
