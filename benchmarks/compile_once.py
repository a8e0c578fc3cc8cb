"""One start of a training script, for `benchmarks.compile`: the first steps of one model in one mode.

Started as a separate process, so that the one-time costs of compiling are paid each time. Writes one line of
JSON: the cost of the first steps, the graphs that were compiled, and those taken from caches.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from benchmarks.gpt import GptLike
from benchmarks.step_modes import SPLIT, TORCH, WHOLE
from ddpopt.ranks.group import one_rank

STEPS = 3
_Result = TypeVar("_Result")


class Residual(nn.Module):
    """Two convolutions with batch norm, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_out = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (batch, channels, height, width) to the same shape."""
        inner = torch.relu(self.norm(self.first(x)))
        out: torch.Tensor = torch.relu(x + self.norm_out(self.second(inner)))
        return out


class ResNetLike(nn.Module):
    """Residual blocks of one size between a stem and a head."""

    def __init__(self, blocks: int, channels: int = 128) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 10)
        self.layer_bytes = sum(p.numel() * p.element_size() for p in self.blocks[0].parameters())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 3, height, width) to logits (batch, 10)."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Workload:
    """A model of any depth, and its training data.

    Attributes:
        build: ``(layers) -> model``.
        inputs: one batch.
        depths: the numbers of layers that are compiled by default.
    """

    build: Callable[[int], GptLike | ResNetLike]
    inputs: Callable[[], torch.Tensor]
    depths: tuple[int, ...]


WORKLOADS: Mapping[str, Workload] = {
    "gpt": Workload(
        lambda layers: GptLike(layers, 160), lambda: torch.randint(0, 100, (2, 32)), (12, 24, 48)
    ),
    "resnet": Workload(ResNetLike, lambda: torch.randn(2, 3, 16, 16), (24,)),
}
"""The models, by their names on the command line; DDP's cap is the size of one layer."""


@dataclass(frozen=True)
class Start:
    """The cost of the first steps of a process.

    Attributes:
        cpu_s: seconds of processor time, including the C++ compiler.
        wall_s: seconds of wall time.
        compiled: the number of graphs that Inductor compiled, with forward and backward counted separately;
            None if its caches are off, because Inductor then does not count.
        reused: the number of graphs that Inductor took from its cache.
    """

    cpu_s: float
    wall_s: float
    compiled: int | None
    reused: int


def first_steps(model: str, layers: int, mode: str) -> Start:
    """Train for a few steps and measure them.

    Args:
        model: a key of `WORKLOADS`.
        layers: the number of layers.
        mode: one of `benchmarks.step_modes.MODES` except eager DDP.

    Returns:
        The cost of the steps.
    """
    torch.manual_seed(0)
    module = WORKLOADS[model].build(layers)
    inputs = WORKLOADS[model].inputs()
    ddp = DistributedDataParallel(module, bucket_cap_mb=module.layer_bytes / 2**20)
    call = _compiled(mode, ddp)
    counters.clear()
    cpu_s, wall_s = _processor_seconds(), time.perf_counter()
    with torch._dynamo.config.patch(optimize_ddp=mode == TORCH):
        for _ in range(STEPS):
            call(inputs).square().mean().backward()
    found, uncached = counters["inductor"], torch._inductor.config.force_disable_caches
    return Start(
        cpu_s=_processor_seconds() - cpu_s,
        wall_s=time.perf_counter() - wall_s,
        compiled=None if uncached else found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
        reused=found["fxgraph_cache_hit"],
    )


def _compiled(mode: str, ddp: DistributedDataParallel) -> Any:
    if mode in (WHOLE, TORCH):
        return torch.compile(ddp)
    return ddpopt.compile(ddp, strategy="split" if mode == SPLIT else "inline", fallback=None)


def _keep_to(processor: int) -> None:
    """Run everything from here on, including the C++ compiler, on one processor."""
    if hasattr(os, "sched_setaffinity"):  # only on Linux
        os.sched_setaffinity(0, {processor})


def _processor_seconds() -> float:
    """Processor time of this process and of the processes it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def on_one_stack(run: Callable[[], _Result]) -> _Result:
    """Call a function on a stack that does not have to grow.

    CPython 3.11 and later keep frames in chunks of 16 KiB. If the stack happens to end close to a chunk's
    end, each call maps a new chunk and unmaps it again, which costs hundreds of times as much as a call.
    Which calls are affected depends on the number of frames below: it changed the same start by 1 to 4
    seconds. A frame that needs just over a megabyte allocates a chunk of two, into which all others fit.
    """
    return run()


on_one_stack.__code__ = on_one_stack.__code__.replace(co_stacksize=2**17 + 1)  # words of 8 bytes


def _warm_up() -> None:
    """Import the modules that compiling needs; they are the same for all modes."""
    layer = nn.Linear(8, 8)
    torch.compile(lambda x: layer(x).relu())(torch.ones(2, 8)).sum().backward()
    torch._dynamo.reset()


def main() -> None:
    """Measure the start given by the arguments: model, layers, mode and processor."""
    model, layers, mode, processor = sys.argv[1:]
    torch.set_num_threads(1)
    _keep_to(int(processor))
    # Dynamo warns at each compile that it drops DDP's profiler range.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    with one_rank():
        _warm_up()
        start = on_one_stack(lambda: first_steps(model, int(layers), mode))
        torch._dynamo.reset()
    sys.stdout.write(json.dumps(asdict(start)) + "\n")


if __name__ == "__main__":
    main()
