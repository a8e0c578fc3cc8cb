"""torch.compile of a DDP module, with torch's DDPOptimizer, breaks a rule: a gradient wherever eager DDP has one.

AOTAutograd, without any optimizer: a value crosses a graph break and is not used behind it; the layer that it comes
from gets zeros for a gradient where eager leaves none.
torch 2.13.0+cpu, 1 rank, backend 'aot_eager'.
Run it with 'python backend-aot-eager-a-gradient-wherever-eager-ddp-has-one-054c82.py'.
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
        self.linear1 = nn.Linear(4, 4)
        self.linear2 = nn.Linear(4, 4)
        self.conv1d3 = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x):
        h1 = self.linear1(x)
        h2 = self.linear2(h1)
        h3 = self.conv1d3(x.unflatten(1, (2, 2)))
        torch._dynamo.graph_break()
        h4 = h3.flatten(1)
        i5 = h1
        b5 = i5 * 0.5
        late5 = i5
        b5.unsqueeze_(0)
        h5 = b5[0] + late5
        return h5


def make_model():
    torch.manual_seed(0)
    return Model()


def make_inputs(rank=0, step=0):
    g = torch.Generator().manual_seed(65536 * step + rank)
    batch = 2
    x = torch.randn(batch, 4, generator=g)
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
    case = Case('backend-aot-eager-a-gradient-wherever-eager-ddp-has-one-054c82', make_model, make_inputs, "drawn", loss, DDP_KWARGS, ('breaks', 'mutation', 'unused'))
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
