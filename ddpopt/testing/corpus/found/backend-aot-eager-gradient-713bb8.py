"""torch.compile of a DDP module, without any optimizer, does not compute what eager DDP computes (gradient).

AOTAutograd, without any optimizer (pytorch#197039): backward computes a value again, from a buffer that has been
updated since. The gradient is wrong, and nothing says so.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python backend-aot-eager-gradient-713bb8.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'aot_eager'
RANK = 0
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() / 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() / 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.upper1 = nn.Parameter(torch.randn(2, 4) / 4)
        self.lower1 = nn.Parameter(torch.randn(2, 4) / 4)
        self.register_buffer("buffer2", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h1 = F.linear(x, torch.cat([self.upper1, self.lower1]))
        v2 = h1
        self.buffer2 += 1
        h2 = v2 + self.buffer2.clone()
        h3 = Halved.apply(h2)
        return h3


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
    """Take 1 step; return the loss and the gradients of the last one by name."""
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
        found = {"the loss": loss.detach()}
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.requires_grad}
        found = {name: value if value is None else value.to_dense().clone() for name, value in found.items()}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found["something was compiled"] = graphs > 0 if compiled else True
    return found | {f"buffer {name}": buffer.detach() for name, buffer in model.named_buffers()}


def main():
    """Run the step in eager and compiled, and compare all that it leaves, bit by bit."""
    expected, got, wrong = step(), step(compiled=True), 0
    for name, value in expected.items():
        try:
            torch.testing.assert_close(got.get(name), value, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            print(f"  {name}: {' '.join(str(error).split())}")
            wrong += 1
    print(f"the difference appears in {wrong} of {len(expected)} values" if wrong else "no difference")
    return int(wrong > 0)


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    exit_code = main()
    torch.distributed.destroy_process_group()
    sys.exit(exit_code)
