"""torch.compile of a DDP module, with torch's DDPOptimizer, breaks a rule: as many graphs as of the model alone.

A float argument that changes from step to step is read in one segment only. AOTAutograd takes it for a constant in the
others, so that Dynamo compiles anew for each value.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python torch-ddp-optimizer-as-many-graphs-as-of-the-model-alone-01f6a1.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'aot_eager'
RANK = 0
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


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


new_model, new_inputs, loss_of = make_model, make_inputs, loss

DDP_ARGUMENTS = {'bucket_cap_mb': 1.0}


def step(alone=False):
    """Take 3 steps under DDP, or of the model alone as Dynamo traces it; return how many graphs were made."""
    model = new_model()
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = True
    torch._dynamo.utils.counters.clear()
    call = model if alone else DistributedDataParallel(model, **DDP_ARGUMENTS)
    call = torch.compile(call, backend="eager" if alone else BACKEND)
    for index in range(3):
        model.zero_grad()
        args, kwargs = new_inputs(RANK, index)
        torch.manual_seed(index * 65536 + RANK)
        loss = loss_of(call(*args, **kwargs))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def main():
    """Count the graphs that Dynamo makes of the model alone, and those under DDP with the backend."""
    alone, under_ddp = step(alone=True), step()
    print(f"  graphs: of the model alone {alone}, under DDP {under_ddp}")
    print("no difference" if under_ddp == alone else "the difference appears")
    return int(under_ddp != alone)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    exit_code = main()
    torch.distributed.destroy_process_group()
    sys.exit(exit_code)
