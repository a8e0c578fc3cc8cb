"""The most memory that a piece of code holds at once.

On the CPU torch's profiler tells every allocation; on a GPU the allocator itself keeps the peak.

Invariant: what was held before is not counted, so models with equal weights and buckets compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(changes: Iterable[int]) -> int:
    """The highest sum on the way, at least 0.

    Args:
        changes: bytes allocated (above 0) and freed (below 0), in the order of time.

    >>> peak_of([100, -40, 70, -130])
    130
    """
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that `run` holds at once, over what is held before.

    Args:
        run: called once.
        device: whose memory counts.

    Returns:
        Bytes of tensors; what a network library or a compiler holds is not among them.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run()
    recorded: Any = profiled.profiler
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    return peak_of(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns()))
