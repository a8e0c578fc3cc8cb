"""torch.compile of a DDP module, with torch's DDPOptimizer, breaks a rule: a gradient wherever eager DDP has one.

A span without grad is cut, as in torch-ddp-optimizer-gradient-7cfc5a: the layers of the branch beside it get no
gradient at all.
torch 2.13.0, 1 rank, backend 'eager'.
Run it with 'python torch-ddp-optimizer-a-gradient-wherever-eager-ddp-has-one-474576.py'.
It exits with 1 if the difference appears, with 0 if it does not.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

BACKEND = 'eager'
RANK = 0
torch._inductor.config.fallback_random = True  # compiled code draws the random numbers that eager draws


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(512, 512) / 512)
        self.linear3 = nn.Linear(512, 512).requires_grad_(False)
        self.linear4 = nn.Linear(512, 512)
        self.flat6 = nn.Parameter(torch.randn(262656) / 512)

    def forward(self, x):
        h1 = x @ self.weight1.t()
        with torch.no_grad():
            h3 = self.linear3(h1)
            n2 = h3
        h2 = n2
        h4 = self.linear4(h2)
        with torch.no_grad():
            h6 = F.linear(h4, self.flat6[:262144].view(512, -1), self.flat6[262144:])
            n5 = h6
        h5 = n5
        return h1 + h4 + h5


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

DDP_ARGUMENTS = {'bucket_cap_mb': 1.0, 'find_unused_parameters': True}


def step(compiled=False):
    """Take 1 step; return the loss and the gradients of the last one by name."""
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
