"""torch.compile of a DDP module, with torch's DDPOptimizer, fails where eager DDP runs (IndexError).

Two values are written to behind cuts, one of them also read by a view that was taken before: a compiled segment looks
for an output that it does not have.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python torch-ddp-optimizer-indexerror-6e2188.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys
import traceback

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'aot_eager'
RANK = 0
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(512, 512)
        self.linear3 = nn.Linear(512, 512)
        self.linear5 = nn.Linear(512, 512)

    def forward(self, x):
        h1 = self.linear1(x)
        i2 = h1
        b2 = i2 * 0.5
        v2 = b2[:, 1:]
        h3 = self.linear3(i2)
        late2 = h3
        v2.add_(late2[:, 1:])
        h2 = b2
        i4 = h2
        b4 = i4 * 0.5
        v4 = b4[:, 1:]
        h5 = self.linear5(i4)
        late4 = h5
        v4.add_(late4[:, 1:])
        h4 = F.pad(v4, (1, 0)) + b4
        return h4


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


new_model, new_inputs, loss_of = make_model, make_inputs, loss

DDP_ARGUMENTS = {'bucket_cap_mb': 1.0}


def step(compiled=False):
    """Take 1 step."""
    model = new_model()
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = True
    torch._dynamo.utils.counters.clear()
    call = DistributedDataParallel(model, **DDP_ARGUMENTS)
    call = torch.compile(call, backend=BACKEND) if compiled else call
    for index in range(1):
        model.zero_grad()
        args, kwargs = new_inputs(RANK, index)
        torch.manual_seed(index * 65536 + RANK)
        loss = loss_of(call(*args, **kwargs))
        torch.autograd.backward(loss)


def main():
    """Run the step in eager, and compiled."""
    step()
    try:
        step(compiled=True)
    except Exception:
        traceback.print_exc()
        print("the difference appears: eager runs, compiled code does not")
        return 1
    print("no difference")
    return 0


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    exit_code = main()
    torch.distributed.destroy_process_group()
    sys.exit(exit_code)
