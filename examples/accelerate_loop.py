"""Train with Accelerate, once in eager DDP and once through ddpopt, with accumulation, bf16 and clipping.

torchrun --nproc-per-node 2 examples/accelerate_loop.py [inductor]
"""

import logging
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

import ddpopt


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = x + layer(x).relu()
        return x


def train(backend: str | None) -> list[Tensor]:
    """Train for four steps, in eager DDP if there is no backend; return the parameters."""
    ddp_options = DistributedDataParallelKwargs(bucket_cap_mb=1)
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, kwargs_handlers=[ddp_options]
    )
    torch.manual_seed(0)
    model = Net(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    step = ddpopt.compile(model, backend=backend) if backend else model
    torch.manual_seed(accelerator.process_index)
    for _ in range(8):
        with accelerator.accumulate(step):
            accelerator.backward((step(torch.randn(16, 256)) - 1).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(step.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]


def main(backend: str = "aot_eager") -> bool:
    """Train twice and compare: aot_eager is bitwise equal, inductor up to rounding."""
    logging.basicConfig()
    logging.getLogger("ddpopt").setLevel(logging.INFO)
    atol = 0.0 if backend == "aot_eager" else 5e-3
    pairs = zip(train(None), train(backend), strict=True)
    equal = all(torch.allclose(eager, ours, rtol=0, atol=atol) for eager, ours in pairs)
    Accelerator().print(f"equal to eager: {'yes' if equal else 'no'}")
    Accelerator().end_training()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
