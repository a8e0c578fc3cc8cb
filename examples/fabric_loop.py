"""Train with Lightning Fabric, once in eager DDP and once through ddpopt, with accumulation and clipping.

torchrun --nproc-per-node 2 examples/fabric_loop.py [inductor]
"""

import logging
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn

import ddpopt


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x).relu()
        return x


def train(backend: str | None) -> list[Tensor]:
    """Train for four steps, in eager DDP if there is no backend; return the parameters."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(bucket_cap_mb=1))
    fabric.launch()
    torch.manual_seed(0)
    net = Net(*(nn.Linear(256, 256) for _ in range(6)))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    step = ddpopt.compile(model, backend=backend) if backend else model
    torch.manual_seed(fabric.global_rank)
    for micro_batch in range(8):
        accumulates = micro_batch % 2 == 0
        with fabric.no_backward_sync(step, enabled=accumulates):
            fabric.backward((step(torch.randn(16, 256)) - 1).square().mean())
        if not accumulates:
            fabric.clip_gradients(step, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def main(backend: str = "aot_eager") -> bool:
    """Train twice and compare: aot_eager is bitwise equal, inductor up to rounding."""
    logging.basicConfig()
    logging.getLogger("ddpopt").setLevel(logging.INFO)
    atol = 0.0 if backend == "aot_eager" else 5e-3
    pairs = zip(train(None), train(backend), strict=True)
    equal = all(torch.allclose(eager, ours, rtol=0, atol=atol) for eager, ours in pairs)
    if dist.get_rank() == 0:
        print(f"equal to eager: {'yes' if equal else 'no'}")
    dist.destroy_process_group()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
