"""The process group of one test: made before its fixtures, destroyed after them.

Invariant: no test meets the process group of another one. A rank that fails leaves its group, so that with
gloo its peers' collectives end at once, and otherwise at the group's time-out.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddpopt.ranks.group import Ranks, joined

__all__ = ["Ranks", "Seat", "gpu_for_each_rank", "one_rank", "seated"]

# A collective that a peer never enters fails before the test's limit ends the process: it says more.
COLLECTIVE_SHARE = 0.5


@dataclass(frozen=True)
class Seat:
    """Where this process stands in one test.

    Attributes:
        store: shared by the ranks of this test, and by no other test.
        rank: this process's number.
        size: how many processes run the test together.
        on_gpu: whether each of them, on whatever node, has a GPU of its own.
    """

    store: Any
    rank: int
    size: int
    on_gpu: bool


def gpu_for_each_rank() -> bool:
    """Tell whether each rank of this node has a GPU of its own."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_size


@contextmanager
def seated(seat: Seat, backend: str | None, limit_s: float) -> Iterator[Ranks]:
    """Make the default process group of one test, and destroy it.

    Args:
        seat: of this process.
        backend: ``"gloo"`` or ``"nccl"``; None for NCCL where each rank has a GPU.
        limit_s: of the test, in seconds.

    Yields:
        The test's view of its ranks.
    """
    backend = backend or ("nccl" if seat.on_gpu else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", seat.rank)))
    limit = timedelta(seconds=COLLECTIVE_SHARE * limit_s)
    try:
        dist.init_process_group(
            backend, store=seat.store, rank=seat.rank, world_size=seat.size, timeout=limit
        )
    except BaseException:
        _forget_failed_group()
        raise
    try:
        with joined(timeout_s=COLLECTIVE_SHARE * limit_s) as ranks:
            yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _forget_failed_group() -> None:
    """Have the next default group named as on the peers: torch also counts a group that it could not make.

    Private in torch 2.11 to 2.13; `destroy_process_group` does the same, but only to a group that was made.
    """
    world: Any = dist.distributed_c10d._world
    world.group_count = 0


@contextmanager
def one_rank() -> Iterator[None]:
    """Make a default process group of this process alone, unless there is one, and destroy what was made."""
    if dist.is_initialized():
        yield
        return
    c10d: Any = dist  # torch does not mark its re-exports
    excepthook = sys.excepthook  # which torch replaces for good when it makes a group
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
