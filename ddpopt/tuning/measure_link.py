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
    *seconds, processor = largest(group, [*own, _processor_s_per_byte(group, device)])
    rows = [(count, count * size, each) for (count, size), each in zip(streams, seconds, strict=True)]
    drain, latency, per_byte = largest(group, fitted(rows))  # LAPACK may round differently elsewhere
    residual = median(abs(drain + count * latency + nbytes * per_byte - s) / s for count, nbytes, s in rows)
    processor = min(processor, per_byte)  # more is noise: sending takes no more than the whole processor
    size, backend = dist.get_world_size(group), str(dist.get_backend(group))
    return Link(latency, per_byte, drain, processor, residual, backend, size, conditions())


def fitted(rows: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Fit ``drain + count * latency + nbytes * per_byte``, by least squares.

    The square of a difference counts in proportion to one over the seconds: longer streams count more, but
    not so much more that they alone count.

    Args:
        rows: all-reduces, bytes and seconds of each stream.

    Returns:
        Drain and latency in seconds, and seconds per byte; none is negative.
    """
    columns = torch.tensor([[1.0, count, nbytes] for count, nbytes, _ in rows], dtype=torch.float64)
    roots = torch.tensor([[s] for _, _, s in rows], dtype=torch.float64).sqrt()
    kept, weighted = [0, 1, 2], columns / roots
    while True:
        found = torch.linalg.lstsq(weighted[:, kept], roots, driver="gelsd").solution[:, 0].tolist()
        if min(found) >= 0:
            drain, latency, per_byte = (dict(zip(kept, found, strict=True)).get(i, 0.0) for i in range(3))
            return drain, latency, per_byte
        del kept[found.index(min(found))]


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

    With and without a stream in turns; the fastest of each count, because other load only adds time.
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
    times = int(1.5 * 50 * sending_s / computing_s) + 1  # the computation lasts longer than the stream
    found: list[tuple[float, float]] = []
    for _ in range(2 * REPEATS):
        found.append((_once_s(group, device, lambda: compute(times)), _once_s(group, device, together)))
        _wait(works)
    alone_s, delayed_s = map(min, zip(*found, strict=True))
    cost_s: float = max(0.0, delayed_s - alone_s) / sum(buffer.nbytes for buffer in buffers)
    return cost_s


def _once_s(group: Any, device: torch.device, call: Callable[[], None]) -> float:
    """Seconds of a call that all ranks begin together."""
    dist.barrier(group)
    begin = now(device)
    call()
    return between(begin, now(device))
