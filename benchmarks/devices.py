"""Where a measurement computes, the CPU or GPUs, and what is different there.

Invariant: whoever reads a clock has waited for the device first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddpopt.errors import InfrastructureError

CPU, CUDA = DEVICES = ("cpu", "cuda")
WORLD_SIZE = 2


def require(kind: str) -> None:
    """Check that this machine has such a device.

    Args:
        kind: one of `DEVICES`.

    Raises:
        InfrastructureError: it has none.
    """
    if kind == CUDA and not torch.cuda.is_available():
        raise InfrastructureError(
            f"--device cuda: expected a GPU, but torch {torch.__version__} sees none here. "
            "Run it where there is one, with a torch built for CUDA, or leave --device out."
        )


def device_of(kind: str, rank: int) -> torch.device:
    """The device of a rank; two ranks share one where there is only one."""
    return torch.device(CPU) if kind == CPU else torch.device(CUDA, rank % torch.cuda.device_count())


def group_backend(kind: str) -> str:
    """What sends: NCCL wants a GPU for each rank; gloo takes tensors of any device."""
    return "nccl" if kind == CUDA and torch.cuda.device_count() >= WORLD_SIZE else "gloo"


def description(kind: str) -> dict[str, str]:
    """What is to be said of the device, by titles."""
    if kind == CPU:
        return {"device": CPU}
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    used = min(WORLD_SIZE, torch.cuda.device_count())
    return {
        "device": f"cuda, {WORLD_SIZE} ranks on {used} of: {', '.join(names)}",
        "CUDA": str(torch.version.cuda),
        "sent by": group_backend(kind),
    }


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds until all that `run` starts is done on this rank."""
    start = now(device)
    run()
    return now(device) - start


def now(device: torch.device) -> float:
    """The time at which the device has done all that it was given."""
    if device.type == CUDA:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def elapsed_together(run: Callable[[], object], device: torch.device) -> float:
    """The same, from when all ranks are ready."""
    dist.barrier()
    return elapsed(run, device)


def larger_of_both(values: Sequence[float], device: torch.device) -> list[float]:
    """For each value the larger one of the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]
