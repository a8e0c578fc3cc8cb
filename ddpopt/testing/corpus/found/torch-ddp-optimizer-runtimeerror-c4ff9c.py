"""torch.compile of a DDP module, with torch's DDPOptimizer, fails where eager DDP runs (RuntimeError).

A parameter is changed in place in one segment and read in another one, and its gradient does not come: DDP still waits
for it when the next forward begins.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python torch-ddp-optimizer-runtimeerror-c4ff9c.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys
import traceback

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'aot_eager'
RANK = 0
# The models of a fuzzer are small: their first buckets are too, or torch's optimizer would cut nothing.
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d1 = nn.Conv1d(2, 2, 3, padding=1)
        self.weight2 = nn.Parameter(torch.randn(4, 4) / 4)
        self.shift2 = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        h1 = self.conv1d1(x.unflatten(1, (2, 2)))
        with torch.no_grad():
            w2 = self.weight2.mul_(0.9)
        view2 = w2.t()
        v2 = h1.flatten(1) + self.shift2
        h2 = v2 @ view2.clone()
        return h2


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


new_model, new_inputs, loss_of = make_model, make_inputs, loss

DDP_ARGUMENTS = {'bucket_cap_mb': 9.5367431640625e-07}


def step(compiled=False):
    """Take 2 steps."""
    model = new_model()
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = True
    torch._dynamo.utils.counters.clear()
    call = DistributedDataParallel(model, **DDP_ARGUMENTS)
    call = torch.compile(call, backend=BACKEND) if compiled else call
    for index in range(2):
        model.zero_grad()
        args, kwargs = new_inputs(RANK, index)
        torch.manual_seed(index * 65536 + RANK)
        loss = loss_of(call(*args, **kwargs))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)


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
