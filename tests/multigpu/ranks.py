"""The ranks that a test runs on: how many, on which devices, and a fresh process group for each test.

Invariant: no test meets the process group of another one. A rank that fails leaves its group, so that with
gloo its peers' collectives end at once, and otherwise at the group's time-out.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["COLLECTIVE_LIMIT_S", "Ranks", "joined_ranks"]

# A collective that a peer never enters fails after this time; well below the limit of a test.
COLLECTIVE_LIMIT_S = 20

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """One test's view of the ranks it runs on.

    Attributes:
        rank: this process's number.
        size: how many processes run the test together.
        backend: ``"nccl"`` where each rank has a GPU of its own, else ``"gloo"``.
        device: where this rank's model belongs.
    """

    rank: int
    size: int
    backend: str
    device: torch.device

    def gather(self, value: Value) -> list[Value]:
        """Give every rank's value to every rank: all collectives stand before any assertion."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


@contextmanager
def joined_ranks(store: Any, rank: int, size: int) -> Iterator[Ranks]:
    """Make the default process group of one test, and destroy it."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_LIMIT_S)
    )
    try:
        yield Ranks(rank, size, backend, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
