"""Train a model without DDP in one graph, and compare with eager DDP, bit for bit.

torchrun --nproc-per-node 2 -m examples.train_step_replicate
"""

import logging
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt

STEPS = 6


def build() -> nn.Module:
    """A small model, with other parameters on each rank."""
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64))


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: Tensor) -> Any:
    """An ordinary step with two micro-batches; only DDP has to be told that one of them sends nothing."""
    first, second = inputs.chunk(2)
    with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
        (model(first) - first).square().mean().backward()
    loss = (model(second) - second).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


def train(model: nn.Module, run: Any) -> list[Tensor]:
    """Train for some steps; return losses, norms and parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[Tensor] = []
    for place in range(STEPS):
        torch.manual_seed(2 * place + dist.get_rank())
        seen += run(model, optimizer, torch.randn(8, 64))
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


def main() -> bool:
    """Train in eager DDP and without DDP, and compare."""
    logging.basicConfig()
    dist.init_process_group("gloo")
    wanted = train(DistributedDataParallel(build()), step)
    own = ddpopt.train_step(step, backend="aot_eager", parallel=ddpopt.Replicate())
    found = train(build(), own)
    is_equal = all(map(torch.equal, found, wanted))
    if dist.get_rank() == 0:
        buckets = [len(bucket.params) for bucket in own.plans[0].buckets]
        print(f"{STEPS} steps, parameters in buckets: {buckets}, equal to eager DDP: {is_equal}")
    dist.destroy_process_group()
    return is_equal


if __name__ == "__main__":
    sys.exit(not main())
