"""Models that people might have, and ``ddpopt verify`` as they run it."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ddpopt.ranks.environment import environment_of_no_rank

MODELS = """
import inspect, os, signal, time
import torch
from torch import nn
from torch._dynamo import register_backend


def small():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)


class Net(nn.Module):  # torch.compile of DDP around a Sequential compiles nothing: pytorch#140416
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).relu()


def net():
    return Net(), torch.randn(4, 8)


class Failing(Net):
    def forward(self, x):
        raise ValueError("this model cannot run")


def failing():
    return Failing(), torch.randn(4, 8)


@register_backend
def killing(gm, inputs):
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return gm


@register_backend
def stuck(gm, inputs):
    if torch.distributed.get_world_size() == 1:
        return gm
    while any(frame.function == "climb" for frame in inspect.stack()):
        time.sleep(0.1)
    return doubling(gm, inputs)


@register_backend
def doubling(gm, inputs):
    return lambda *args: tuple(value * 2 if torch.is_tensor(value) else value for value in gm(*args))
"""


def write_shop(folder: Path) -> Path:
    """Write the models into a folder, as the module ``shop``."""
    (folder / "shop.py").write_text(MODELS)
    return folder


def run(
    folder: Path, *arguments: str, torchrun: bool = False, variables: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``ddpopt verify`` in a folder, on ranks of its own or on two of torchrun's."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    command = [sys.executable, *ranks, "-m", "ddpopt", "verify", *arguments]
    environment = {**environment_of_no_rank(), "OMP_NUM_THREADS": "1", **(variables or {})}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
