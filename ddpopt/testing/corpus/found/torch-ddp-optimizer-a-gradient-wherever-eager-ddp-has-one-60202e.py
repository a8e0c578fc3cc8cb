"""torch.compile of a DDP module, with torch's DDPOptimizer, breaks a rule: a gradient wherever eager DDP has one.

A layer is read on the way to integers only, so that its gradient reaches nobody: eager DDP leaves none. A cut makes the
layer's value an output of a segment, for which autograd wants a gradient: it comes as zeros.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python torch-ddp-optimizer-a-gradient-wherever-eager-ddp-has-one-60202e.py'.
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
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_leaves


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(512, 512)
        self.linear2 = nn.Linear(256, 768)
        self.weight_norm3 = weight_norm(nn.Linear(512, 512))

    def forward(self, x):
        h1 = self.linear1(x)
        h2 = F.scaled_dot_product_attention(*self.linear2(h1.unflatten(1, (2, 256))).chunk(3, dim=-1))
        h3 = self.weight_norm3(h1)
        return h3, h2.flatten(1).argmax(1)


def make_model():
    torch.manual_seed(0)
    return Model()


def make_inputs(rank=0, step=0):
    g = torch.Generator().manual_seed(65536 * step + rank)
    batch = 2
    x = torch.randn(batch, 512, generator=g)
    return (x,), {}


def loss(output):
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return sum(leaf.abs().double().square().sum() for leaf in leaves) / sum(leaf.numel() for leaf in leaves)


DDP_KWARGS = {'bucket_cap_mb': 1.0, 'find_unused_parameters': True}

new_model, new_inputs, loss_of = make_model, make_inputs, loss


def main():
    """Hold the mode against eager DDP."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    case = Case('torch-ddp-optimizer-a-gradient-wherever-eager-ddp-has-one-60202e', make_model, make_inputs, "drawn", loss, DDP_KWARGS, ('unused',))
    case.step(model := case.model(), 0, 0).backward()
    unused = tuple(name for name, p in model.named_parameters() if p.requires_grad and p.grad is None)
    case = replace(case, unused=unused)
    verdict = verify_here(case, mode='torch', backend=BACKEND, steps=1)
    if dist.get_rank() == 0:
        for finding in verdict.findings:
            print(f"  {finding.level} {finding.message}")
        print("the difference appears" if verdict.exit_code == 1 else "no difference", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
