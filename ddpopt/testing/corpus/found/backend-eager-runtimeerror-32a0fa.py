"""torch.compile of a DDP module, without any optimizer, fails where eager DDP runs (RuntimeError).

Dynamo, without any optimizer and whatever compiles its graphs: a complex view of an input crosses a graph break.
Its shape is made anew from the input, whose last dimension need not be pairs.
torch 2.13.0, 1 rank, backend 'eager'.
Run it with 'python backend-eager-runtimeerror-32a0fa.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys
import traceback

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'eager'
RANK = 0
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear0 = nn.Linear(4, 4)

    def forward(self, x):
        h1 = torch.view_as_complex(x.contiguous().unflatten(1, (2, 2))).conj()
        torch._dynamo.graph_break()
        h2 = torch.view_as_real(h1.resolve_conj()).flatten(1)
        return self.linear0(h2)


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
