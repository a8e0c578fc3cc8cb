"""A process group of one rank, for tests that need DDP's machinery but no peers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def single_rank() -> Iterator[None]:
    """Make a default process group of this process alone, and destroy it."""
    c10d: Any = dist  # torch does not mark its re-exports
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
