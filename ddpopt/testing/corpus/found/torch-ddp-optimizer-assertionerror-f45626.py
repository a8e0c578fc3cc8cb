"""torch.compile of a DDP module, with torch's DDPOptimizer, fails where eager DDP runs (AssertionError).

A base is written to behind a cut, a buffer is updated and an input is viewed: an output of the segment is taken for a
view of another tensor than its own, and has another shape than it says.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python torch-ddp-optimizer-assertionerror-f45626.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys
import traceback

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._pytree import tree_leaves

BACKEND = 'aot_eager'
RANK = 0
# The models of a fuzzer are small: their first buckets are too, or torch's optimizer would cut nothing.
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1024
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Symmetric(nn.Module):
    def forward(self, weight):
        return (weight + weight.t()) / 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear2 = nn.Linear(4, 32)
        self.linear2b = nn.Linear(32, 4)
        self.register_parametrization4 = register_parametrization(nn.Linear(4, 4), "weight", Symmetric())
        self.register_buffer("buffer5", torch.zeros((), dtype=torch.int64))
        storage6 = torch.randn(2, 4, 4) / 4
        self.near6 = nn.Parameter(storage6[0])
        self.far6 = nn.Parameter(storage6[1])

    def forward(self, x):
        i1 = x
        b1 = i1 * 0.5
        v1 = b1[:, 1:]
        h2 = self.linear2b(torch.relu(self.linear2(i1)))
        late1 = h2
        b1.add_(late1)
        h1 = b1
        s3 = h1
        for _ in range(2):
            h4 = self.register_parametrization4(s3)
            v5 = h4
            self.buffer5 += 1
            h5 = v5 + self.buffer5.clone()
            s3 = h5
        h3 = s3
        h6 = (h3 @ self.near6) @ self.far6
        return h6, x[:, 1:]


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

DDP_ARGUMENTS = {'bucket_cap_mb': 0.0009765625}


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
