"""Process groups for measurements, over a rendezvous file, always taken down again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

COLLECTIVE_LIMIT = timedelta(seconds=60)


@contextmanager
def process_group(rank: int, world_size: int, rendezvous: str, backend: str = "gloo") -> Iterator[None]:
    """A process group.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        rendezvous: path of a file that does not exist yet, the same on all ranks.
        backend: what sends.

    Yields:
        Nothing; the group is the default one inside.
    """
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_LIMIT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def single_rank() -> Iterator[None]:
    """A group of one: DDP needs a group also where nothing has to be sent."""
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, str(Path(folder) / "rendezvous")):
        yield
