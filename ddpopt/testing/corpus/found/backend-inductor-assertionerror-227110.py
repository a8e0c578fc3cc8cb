"""torch.compile of a DDP module, without any optimizer, fails where eager DDP runs (AssertionError).

Inductor, without any optimizer: it adds up the sparse gradients of a layer that is called twice as if they were dense.
torch 2.13.0, 1 rank, backend 'inductor'.
Run it with 'python backend-inductor-assertionerror-227110.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys
import traceback

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'inductor'
RANK = 0
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Block1(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding2 = nn.Embedding(5, 4, sparse=True)

    def forward(self, x, ids):
        h2 = x + self.embedding2(ids)
        return h2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = Block1()

    def forward(self, x, ids):
        h1 = self.block1(self.block1(x, ids), ids)
        return h1


def make_model():
    torch.manual_seed(0)
    return Model()


def make_inputs(rank=0, step=0):
    g = torch.Generator().manual_seed(65536 * step + rank)
    batch = 2
    x = torch.randn(batch, 4, generator=g)
    ids = torch.randint(5, (batch,), generator=g)
    return (x, ids), {}


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
    torch._dynamo.config.optimize_ddp = False
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
