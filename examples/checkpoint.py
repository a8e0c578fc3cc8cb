"""Stop a compiled training, resume it from a checkpoint, and compare with a run that never stopped.

torchrun --nproc-per-node 2 -m examples.checkpoint
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpopt

STEPS, STOP = 6, 3


class Run:
    """A model in DDP, compiled, with its optimizer and schedule."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.step = ddpopt.compile(self.model, backend="aot_eager")

    def train(self, steps: range) -> None:
        """Train for some steps; the step's number and the rank seed its batch and its dropout."""
        for number in steps:
            torch.manual_seed(2 * number + dist.get_rank())
            batch = torch.randn(8, 64)
            (self.step(batch) - batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        """A checkpoint: the model's own names, without DDP's and the compiler's prefixes."""
        parts = {"model": self.model.module, "optimizer": self.optimizer, "schedule": self.schedule}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; every rank reads it."""
        saved = torch.load(path, weights_only=True)
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])

    def parameters(self) -> list[Tensor]:
        """The parameters."""
        return [each.detach() for each in self.model.parameters()]


def main() -> bool:
    """Train twice, once with a stop."""
    dist.init_process_group("gloo")
    whole = Run()
    whole.train(range(STEPS))
    paths: list[Any] = [None]
    with tempfile.TemporaryDirectory() as folder:
        stopped = Run()
        stopped.train(range(STOP))
        if dist.get_rank() == 0:
            paths = [Path(folder) / "checkpoint.pt"]
            torch.save(stopped.state(), paths[0])
        dist.broadcast_object_list(paths)
        resumed = Run()
        resumed.load(paths[0])
        dist.barrier()  # the folder is removed when all have read
        resumed.train(range(STOP, STEPS))
    is_equal = all(map(torch.equal, resumed.parameters(), whole.parameters()))
    if dist.get_rank() == 0:
        print(f"stopped after {STOP} of {STEPS} steps, equal to a run that never stopped: {is_equal}")
    dist.destroy_process_group()
    return is_equal


if __name__ == "__main__":
    sys.exit(not main())
