"""A small GPT-2 of the transformers library, without a download: for ddpopt verify, or in a plain loop.

ddpopt verify examples.transformers_gpt2:make
torchrun --nproc-per-node 2 examples/transformers_gpt2.py
"""

import logging
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import ddpopt


def make() -> tuple[nn.Module, dict[str, Tensor]]:
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=64, use_cache=False)
    tokens = torch.randint(0, config.vocab_size, (4, 32))
    model: nn.Module = GPT2LMHeadModel(config)
    return model, {"input_ids": tokens, "labels": tokens}


def train(backend: str | None) -> list[Tensor]:
    """Train for three steps, in eager DDP if there is no backend; return the parameters."""
    torch.manual_seed(0)
    model = DistributedDataParallel(make()[0], bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    step = ddpopt.compile(model, backend=backend) if backend else model
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        step(**make()[1]).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def main(backend: str = "aot_eager") -> bool:
    """Train twice and compare: aot_eager is bitwise equal, inductor up to rounding."""
    logging.basicConfig()
    logging.getLogger("ddpopt").setLevel(logging.INFO)
    dist.init_process_group("gloo")
    torch._inductor.config.fallback_random = True  # dropout draws eager's numbers
    atol = 0.0 if backend == "aot_eager" else 2e-4
    pairs = zip(train(None), train(backend), strict=True)
    equal = all(torch.allclose(eager, ours, rtol=0, atol=atol) for eager, ours in pairs)
    if dist.get_rank() == 0:
        print(f"equal to eager: {'yes' if equal else 'no'}")
    dist.destroy_process_group()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
