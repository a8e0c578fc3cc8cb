"""Train GPT-2 of transformers with a whole step in one graph, and compare with the same function in eager.

torchrun --nproc-per-node 2 examples/train_step.py [inductor]
"""

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import ddpopt

STEPS = 6


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Any:
    """An ordinary step: it is the same function that runs in eager."""
    with model.no_sync():
        model(input_ids=tokens[:1], labels=tokens[:1]).loss.backward()
    loss = model(input_ids=tokens[1:], labels=tokens[1:]).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def build() -> Any:
    """A small GPT-2, without a download."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=320, n_positions=64))


def train(decorate: Callable[[Any], Any]) -> list[Tensor]:
    """Train for some steps under a schedule; return the losses, norms and parameters."""
    model = DistributedDataParallel(build(), bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    run, seen = decorate(step), []
    for place in range(STEPS):
        torch.manual_seed(2 * place + dist.get_rank())
        seen += run(model, optimizer, torch.randint(0, 320, (4, 32)))
        schedule.step()
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


def main(backend: str = "aot_eager") -> bool:
    """Train twice and compare, up to rounding: a compiled AdamW counts its steps in a tensor."""
    if importlib.util.find_spec("transformers") is None:
        print("skipped: transformers is not installed (pip install transformers)")
        return True
    logging.basicConfig()
    logging.getLogger("ddpopt").setLevel(logging.INFO)
    dist.init_process_group("gloo")
    torch._inductor.config.fallback_random = True  # dropout draws eager's numbers
    pairs = zip(train(lambda eager: eager), train(ddpopt.train_step(backend=backend)), strict=True)
    tolerance = 1e-4 if backend == "aot_eager" else 1e-2
    equal = all(torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in pairs)
    print(f"equal to eager: {'yes' if equal else 'no'}")
    dist.destroy_process_group()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
