"""Measuring a link: streams of all-reduces on a process group, and a line through their times.

A stream is what the reducer sends in a backward: all-reduces that are launched one after another without
waiting, and waited for at the end. Invariant: all ranks get the same link, the slowest rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpopt.tuning.recording import between, now
from ddpopt.tuning.records import LARGEST, Link, conditions, largest

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, LARGEST)
"""Bytes of one all-reduce."""
COUNTS = (1, 3, 8)
"""All-reduces in a stream."""
REPEATS = 5
MOST_BYTES = 1 << 24
"""Streams of more bytes are left out."""
COMPUTE_SIZE = 192
"""Rows of the square matrices that are multiplied while a stream is sent."""


def measure_link(group: Any, device: torch.device) -> Link:
    """Measure all-reduces on a process group; a collective of all its ranks.

    Args:
        group: the process group.
        device: of the buffers.

    Returns:
        The link; its costs are equal on all ranks.

    Raises:
        InfrastructureError: a rank did not answer in time.
    """
    streams = [(count, size) for size in SIZES for count in COUNTS if size * count <= MOST_BYTES]
    own = [_stream_s(group, device, *stream) for stream in streams]
    slowest = zip(streams, largest(group, own), strict=True)
    rows = [(count, count * size, each) for (count, size), each in slowest]
    latency, per_byte = fitted(rows)
    residual = median(abs(max(count * latency, n * per_byte) / s - 1) for count, n, s in rows)
    # more is noise: sending takes no more than the whole processor
    processor = min(_processor_s_per_byte(group, device), per_byte)
    size, backend = dist.get_world_size(group), str(dist.get_backend(group))
    return Link(latency, per_byte, processor, residual, backend, size, conditions())


def fitted(rows: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Fit ``max(count * latency, nbytes * per_byte)`` to the times of streams, by least squares.

    Args:
        rows: all-reduces of one size, their bytes, and the seconds of the stream.

    Returns:
        The latency in seconds, from the streams of the smallest all-reduces, and seconds per byte, from all:
        the large ones decide.
    """
    least = min(nbytes // count for count, nbytes, _ in rows)
    small = [(count, s) for count, nbytes, s in rows if nbytes == count * least]
    return _slope(small), _slope([(nbytes, s) for _, nbytes, s in rows])


def _slope(points: Sequence[tuple[float, float]]) -> float:
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)


def _stream_s(group: Any, device: torch.device, count: int, nbytes: int) -> float:
    buffers = [torch.zeros(nbytes // 4, device=device) for _ in range(count)]
    times = [_once_s(group, device, lambda: _wait(_sent(group, buffers))) for _ in range(REPEATS + 1)]
    return median(times[1:])


def _sent(group: Any, buffers: Sequence[Tensor]) -> list[Any]:
    return [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _processor_s_per_byte(group: Any, device: torch.device) -> float:
    """How much longer a fixed computation takes next to a stream, per byte of the stream.

    With and without a stream in turns; each time the slowest rank counts, because a step waits for it.
    """
    matrix = torch.ones(COMPUTE_SIZE, COMPUTE_SIZE, device=device)
    buffers, works = [torch.zeros(1 << 18, device=device) for _ in range(8)], list[Any]()

    def compute(times: int = 50) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    def together() -> None:
        works[:] = _sent(group, buffers)
        compute(times)

    sending_s = min(_once_s(group, device, lambda: _wait(_sent(group, buffers))) for _ in range(REPEATS))
    computing_s = min(_once_s(group, device, compute) for _ in range(REPEATS))
    # on each rank, the computation lasts longer than the stream
    times = int(1.5 * 50 * sending_s / computing_s) + 1
    alone, delayed = list[float](), list[float]()
    for _ in range(2 * REPEATS):
        alone.append(_once_s(group, device, lambda: compute(times)))
        delayed.append(_once_s(group, device, together))
        _wait(works)
    delay_s = median(largest(group, delayed)) - median(largest(group, alone))
    return max(0.0, delay_s) / sum(buffer.nbytes for buffer in buffers)


def _once_s(group: Any, device: torch.device, call: Callable[[], None]) -> float:
    """Seconds of a call that all ranks begin together."""
    dist.barrier(group)
    begin = now(device)
    call()
    return between(begin, now(device))
