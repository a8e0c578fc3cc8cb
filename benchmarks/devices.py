"""The device of a measurement, CPU or GPUs, and the differences between them.

Invariant: the device is synchronized before any clock is read.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ddpopt.errors import InfrastructureError

CPU, CUDA = DEVICES = ("cpu", "cuda")
WORLD_SIZE = 2


def require(kind: str) -> None:
    """Check that this machine has a device of a kind.

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
    """The device of a rank; two ranks share a GPU if there is only one."""
    return torch.device(CPU) if kind == CPU else torch.device(CUDA, rank % torch.cuda.device_count())


def group_backend(kind: str) -> str:
    """The process group's backend: NCCL needs a GPU for each rank; gloo takes tensors on any device."""
    return "nccl" if kind == CUDA and torch.cuda.device_count() >= WORLD_SIZE else "gloo"


def description(kind: str) -> dict[str, str]:
    """Facts about the device, by title."""
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
    """Seconds until everything that `run` starts is done on this rank."""
    start = now(device)
    run()
    return now(device) - start


def now(device: torch.device) -> float:
    """The time after the device has finished all its work."""
    if device.type == CUDA:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def elapsed_together(run: Callable[[], object], device: torch.device) -> float:
    """Like `elapsed`, but starts when all ranks are ready."""
    dist.barrier()
    return elapsed(run, device)


def larger_of_both(values: Sequence[float], device: torch.device) -> list[float]:
    """For each value, the larger of the two ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor]
