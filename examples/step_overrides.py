"""Two changes to a step in one graph: experts that are kept out of it, and a pass that shows its collectives.

torchrun --nproc-per-node 2 examples/step_overrides.py [inductor]
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.step.overrides import Override, opaque

WIDTH = 16


class Experts(nn.Module):
    """Sends each row to one of several layers. How many rows a layer gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same shape."""
        shares = self.router(x).softmax(-1)
        chosen = shares.argmax(-1)
        result = torch.zeros_like(x)
        for place, layer in enumerate(self.layers):
            rows = (chosen == place).nonzero()[:, 0]
            result = result.index_add(0, rows, layer(x[rows]) * shares[rows, place, None])
        return result


class KeepExpertsOut(Override):
    """Experts become one operator of the graph."""

    def replacement(self, name: str, module: nn.Module) -> nn.Module:  # noqa: ARG002
        """Replace experts, wherever they are."""
        return opaque(module) if isinstance(module, Experts) else module


def show_collectives(gm: fx.GraphModule) -> None:
    """Print the place of each collective, and of what waits for it."""
    for place, node in enumerate(gm.graph.nodes):
        if node.name.endswith(("_all_reduce", "_wait")):
            print(f"{place:4} of {len(gm.graph.nodes)}: {node.name}")


def train(decorate: Callable[[Any], Any]) -> list[Tensor]:
    """Train for four steps; return the losses and parameters."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Experts(), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @decorate
    def step(x: Tensor) -> Tensor:
        loss: Tensor = (model(x) - x).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.manual_seed(dist.get_rank())
    losses = [step(torch.randn(32, WIDTH)) for _ in range(4)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def main(backend: str = "aot_eager") -> bool:
    """Train in eager and as one graph, and compare: aot_eager is bitwise equal, inductor up to rounding."""
    dist.init_process_group("gloo")
    transform = show_collectives if dist.get_rank() == 0 else None
    ours = ddpopt.train_step(backend=backend, overrides=[KeepExpertsOut()], transform=transform)
    pairs = zip(train(lambda eager: eager), train(ours), strict=True)
    atol = 0.0 if backend == "aot_eager" else 1e-5
    equal = all(torch.allclose(one, other, rtol=0, atol=atol) for one, other in pairs)
    print(f"equal to eager: {'yes' if equal else 'no'}")
    dist.destroy_process_group()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
