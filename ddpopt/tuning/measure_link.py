"""Measuring a link: streams of all-reduces on a process group, and a line through their times.

A stream is what the reducer sends in a backward: all-reduces that are launched one after another without
waiting, and waited for at the end. Invariant: all ranks get the same link.
"""

from collections.abc import Sequence
from statistics import linear_regression, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpopt.tuning.recording import between, now
from ddpopt.tuning.records import LARGEST, Link, conditions

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, LARGEST)
"""Bytes of one all-reduce."""
COUNTS = (1, 3, 8)
"""All-reduces in a stream."""
REPEATS = 5
MOST_BYTES = 1 << 24
"""Streams of more bytes are left out."""
COMPUTE_SIZE = 192
"""Rows of the square matrices that are multiplied while a stream is sent."""
A_PART = 5
"""Multiplications after each of which the stream is looked at."""


def measure_link(group: Any, device: torch.device) -> Link:
    """Measure all-reduces on a process group; a collective of all its ranks.

    Args:
        group: the process group.
        device: of the buffers.

    Returns:
        The link; its costs are equal on all ranks.
    """
    streams = [(count, size) for size in SIZES for count in COUNTS if size * count <= MOST_BYTES]
    memory = torch.zeros(MOST_BYTES // 4, dtype=torch.float32, device=device)
    buffers = [torch.split(memory[: count * size // 4], size // 4) for count, size in streams]
    # round after round, so that a busy moment is in one time of each stream; the first one warms up
    own = [[_stream_s(group, device, each) for each in buffers] for _ in range(REPEATS + 1)]
    # other load only adds time
    times = _typical(own[1:], group, device, 0.25)
    nbytes = [count * size for count, size in streams]
    latency = linear_regression(COUNTS, times[: len(COUNTS)], proportional=True).slope  # of the smallest
    per_byte = linear_regression(nbytes, times, proportional=True).slope  # the large ones decide
    each = zip(streams, nbytes, times, strict=True)
    residual = median(abs(max(count * latency, n * per_byte) / s - 1) for (count, _), n, s in each)
    processor, busy = _mutual(group, device)
    size = dist.get_world_size(group)
    backend = str(dist.get_backend(group))
    # more is noise: sending takes no more than the whole processor
    return Link(latency, per_byte, min(processor, per_byte), busy, residual, backend, size, conditions())


def _typical(rows: Sequence[Any], group: Any, device: torch.device, q: float = 0.5) -> list[float]:
    """Quantiles of the columns, on average over the ranks: the largest would be noise of one of them."""
    found = torch.tensor(rows, dtype=torch.float64, device=device).quantile(q, 0)
    dist.all_reduce(found, group=group)
    return [*map(float, found / dist.get_world_size(group))]


def _stream_s(group: Any, device: torch.device, buffers: Sequence[Tensor]) -> float:
    """Seconds of a stream that all ranks begin together."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL's barrier would warn
    begin = now(device)
    for work in _sent(group, buffers):
        work.wait()
    return between(begin, now(device))


def _sent(group: Any, buffers: Sequence[Tensor]) -> list[Any]:
    return [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]


def _mutual(group: Any, device: torch.device) -> tuple[float, float]:
    """What sending and computing cost each other.

    With and without the other in turns. The delay is a small difference of long times, so it is taken between
    neighbors, and then the median of the differences.

    Returns:
        How much longer a computation takes for each byte that is sent next to it, in seconds, and how many
        times as long the sending takes.
    """
    matrix = torch.ones(COMPUTE_SIZE, COMPUTE_SIZE, dtype=torch.float32, device=device)
    buffers = [torch.zeros(1 << 19, dtype=torch.float32, device=device) for _ in range(8)]

    def computing(parts: int, works: Sequence[Any] = ()) -> tuple[float, float]:
        """Seconds of a computation, and of what is sent meanwhile."""
        begin = now(device)
        busy_s = 0.0
        for _ in range(parts):
            for _ in range(A_PART):
                torch.mm(matrix, matrix)
            computed_s = between(begin, now(device))  # waits for a GPU
            if not busy_s and all(work.is_completed() for work in works):
                busy_s = computed_s
        for work in works:
            work.wait()
        return computed_s, busy_s or between(begin, now(device))

    part_s = min(computing(1)[0] for _ in range(REPEATS))
    # on each rank, the computation lasts longer than the stream
    parts = int(2 * min(_stream_s(group, device, buffers) for _ in range(REPEATS)) / part_s) + 1
    rows: list[tuple[float, ...]] = []
    for _ in range(2 * REPEATS):
        undelayed_s, _ = computing(parts)
        _stream_s(group, device, ())  # the ranks begin together
        delayed_s, busy_s = computing(parts, _sent(group, buffers))
        rows.append((delayed_s - undelayed_s, busy_s, _stream_s(group, device, buffers)))
    delay_s, busy_s, idle_s = _typical(rows, group, device)
    return max(0.0, delay_s) / sum(buffer.nbytes for buffer in buffers), max(1.0, busy_s / idle_s)
