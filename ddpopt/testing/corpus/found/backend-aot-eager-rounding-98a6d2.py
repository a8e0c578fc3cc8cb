"""torch.compile of a DDP module, without any optimizer, does not compute what eager DDP computes (rounding).

AOTAutograd, without any optimizer: the gradients of a cell that runs twice are added up in another order than
eager's. The last bits differ.
torch 2.13.0, 1 rank, backend 'aot_eager'.
Run it with 'python backend-aot-eager-rounding-98a6d2.py'.
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
        self.grucell1 = nn.GRUCell(16, 16)

    def forward(self, x):
        i1 = x
        s1 = i1
        for _ in range(2):
            s1 = self.grucell1(i1, s1)
        h1 = s1
        return h1


def make_model():
    torch.manual_seed(0)
    return Model()


def make_inputs(rank=0, step=0):
    g = torch.Generator().manual_seed(65536 * step + rank)
    batch = 2
    x = torch.randn(batch, 16, generator=g)
    return (x,), {}


def loss(output):
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    leaves = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
    return sum(leaf.abs().double().square().sum() for leaf in leaves) / sum(leaf.numel() for leaf in leaves)


new_model, new_inputs, loss_of = make_model, make_inputs, loss

DDP_ARGUMENTS = {'bucket_cap_mb': 1.0}


def step(compiled=False):
    """Take 3 steps; return the loss and the gradients of the last one by name."""
    model = new_model()
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.utils.counters.clear()
    call = DistributedDataParallel(model, **DDP_ARGUMENTS)
    call = torch.compile(call, backend=BACKEND) if compiled else call
    for index in range(3):
        model.zero_grad()
        args, kwargs = new_inputs(RANK, index)
        torch.manual_seed(index * 65536 + RANK)
        loss = loss_of(call(*args, **kwargs))
        torch.autograd.backward(loss)
        found = {"the loss": loss.detach()}
        found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.requires_grad}
        found = {name: value if value is None else value.to_dense().clone() for name, value in found.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
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
