"""Random numbers that are drawn without the caller's generators moving on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave torch's generators, of the CPU and of each GPU in use, as they were found."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # of torch
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if in_use else ()):
        yield
