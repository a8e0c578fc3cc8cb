"""Train with Lightning's Trainer, once in eager DDP and once through ddpopt, with accumulation and clipping.

TORCH_LOGS=ddpopt torchrun --nproc-per-node 2 examples/lightning_trainer.py [inductor]
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

import ddpopt


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(*(nn.Linear(256, 256) for _ in range(6)))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = (self.net(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(backend: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    task, data = Task(), DataLoader[Tensor](list(torch.randn(64, 256)), batch_size=8)  # type: ignore[arg-type]
    if backend:
        task.net.compile(backend=ddpopt.DdpoptBackend(backend))
    lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(bucket_cap_mb=1), max_epochs=2, logger=False,
        accumulate_grad_batches=2, gradient_clip_val=1.0, enable_checkpointing=False,
    ).fit(task, data)  # fmt: skip
    return [parameter.detach() for parameter in task.parameters()]


def main(backend: str = "aot_eager") -> bool:
    """Train twice and compare: aot_eager is bitwise equal, inductor up to rounding."""
    atol = 0.0 if backend == "aot_eager" else 5e-3
    pairs = zip(train(None), train(backend), strict=True)
    equal = all(torch.allclose(eager, ours, rtol=0, atol=atol) for eager, ours in pairs)
    if torch.distributed.get_rank() == 0:
        print(f"equal to eager: {'yes' if equal else 'no'}")
    torch.distributed.destroy_process_group()
    return equal


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
