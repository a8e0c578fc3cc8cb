"""torch.compile of a DDP module, with torch's DDPOptimizer, breaks a rule: as many graphs as of the model alone.

A float argument that changes from step to step is read in one segment only. AOTAutograd takes it for a constant in the
others, so that Dynamo compiles anew for each value.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python torch-ddp-optimizer-as-many-graphs-as-of-the-model-alone-01f6a1.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist

from ddpopt.testing.case import Case
from ddpopt.verify.runner import verify_here

BACKEND = 'aot_eager'
RANK = 0

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(512, 512) / 512)
        self.shift1 = nn.Parameter(torch.zeros(512))

    def forward(self, x, rate):
        with torch.no_grad():
            self.weight1.mul_(0.9)
        view1 = self.weight1.t()
        v1 = x + self.shift1
        h1 = v1 @ view1.clone()
        h2 = h1 * (rate / 4)
        return h2


def make_model():
    torch.manual_seed(0)
    return Model()


def make_inputs(rank=0, step=0):
    g = torch.Generator().manual_seed(65536 * step + rank)
    batch = 2
    x = torch.randn(batch, 512, generator=g)
    rate = 2 + step / 4
    return (x, rate), {}


def loss(output):
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return sum(leaf.abs().double().square().sum() for leaf in leaves) / sum(leaf.numel() for leaf in leaves)


DDP_KWARGS = {'bucket_cap_mb': 1.0}

new_model, new_inputs, loss_of = make_model, make_inputs, loss


def main():
    """Hold the mode against eager DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    case = Case('torch-ddp-optimizer-as-many-graphs-as-of-the-model-alone-01f6a1', make_model, make_inputs, "drawn", loss, DDP_KWARGS, ())
    case.step(model := case.model(), 0, 0).backward()
    unused = tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    case = replace(case, unused=unused)
    verdict = verify_here(case, mode='torch', backend=BACKEND, steps=3)
    if dist.get_rank() == 0:
        for finding in verdict.findings:
            print(f"  {finding.level} {finding.message}")
        print("the difference appears" if verdict.exit_code == 1 else "no difference", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
