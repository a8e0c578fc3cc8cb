"""Measuring a link: streams of all-reduces on the process group of a DDP module, and a line through their times.

A stream is what the reducer sends in a backward: all-reduces that are launched one after another without
waiting, and waited for at the end. Invariant: all ranks get the same link, the slowest rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddpopt.tuning.records import Link, conditions

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
"""Bytes of one all-reduce."""
COUNTS = (1, 3, 8)
"""All-reduces in a stream."""
REPEATS = 5
MOST_BYTES = 1 << 24
"""Streams of more bytes are left out."""
COMPUTE_SIZE = 192
"""Rows of the square matrices that are multiplied while a stream is sent."""


def measure_link(group: Any, device: torch.device, told: Callable[[str], None] = lambda _: None) -> Link:
    """Measure all-reduces on a process group; a collective of all its ranks.

    Args:
        group: the process group.
        device: of the buffers.
        told: called with a few words before each size.

    Returns:
        The link, equal on all ranks.
    """
    rows: list[tuple[int, int, float]] = []
    for nbytes in SIZES:
        told(f"all-reduce of {nbytes} bytes")
        for count in COUNTS:
            if nbytes * count <= MOST_BYTES:
                rows.append((count, count * nbytes, _stream_s(group, device, count, nbytes)))
    drain, latency, per_byte = fitted(rows)
    predicted = [drain + count * latency + nbytes * per_byte for count, nbytes, _ in rows]
    residual = max(abs(p - s) / s for p, (_, _, s) in zip(predicted, rows, strict=True))
    told("computation next to a stream")
    return Link(
        latency_s=latency,
        seconds_per_byte=per_byte,
        drain_s=drain,
        processor_s_per_byte=_agreed(group, device, _processor_s_per_byte(group, device)),
        residual=residual,
        backend=str(dist.get_backend(group)),
        world_size=dist.get_world_size(group),
        measured=conditions(),
    )


def fitted(rows: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Fit ``drain + count * latency + nbytes * per_byte`` to streams, by least squares of relative differences.

    Args:
        rows: all-reduces, bytes and seconds of each stream.

    Returns:
        Drain and latency in seconds, and seconds per byte; none is negative.
    """
    columns = torch.tensor([[1.0, count, nbytes] for count, nbytes, _ in rows], dtype=torch.float64)
    seconds = torch.tensor([s for _, _, s in rows], dtype=torch.float64)
    scale = columns.abs().amax(0)
    weighted = columns / scale / seconds[:, None]
    kept = [0, 1, 2]
    while True:
        found = torch.linalg.lstsq(weighted[:, kept], torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0]
        if bool((found >= 0).all()):
            break
        del kept[int(found.argmin())]
    result = torch.zeros(3, dtype=torch.float64)
    result[kept] = found
    drain, latency, per_byte = (result / scale).tolist()
    return drain, latency, per_byte


def _stream_s(group: Any, device: torch.device, count: int, nbytes: int) -> float:
    buffers = [torch.zeros(nbytes // 4, device=device) for _ in range(count)]
    _send(group, buffers)
    return _agreed(group, device, median(_timed(group, device, lambda: _send(group, buffers)) for _ in range(REPEATS)))


def _send(group: Any, buffers: Sequence[Tensor]) -> None:
    for work in [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]:
        work.wait()


def _processor_s_per_byte(group: Any, device: torch.device) -> float:
    """How much longer a fixed computation takes next to a stream, per byte of the stream."""
    matrix = torch.ones(COMPUTE_SIZE, COMPUTE_SIZE, device=device)
    buffers = [torch.zeros(1 << 18, device=device) for _ in range(8)]
    nbytes = sum(buffer.numel() * 4 for buffer in buffers)
    sending_s = _timed(group, device, lambda: _send(group, buffers))

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix)

    one_s = _timed(group, device, lambda: compute(50)) / 50
    times = int(2 * sending_s / one_s) + 1  # the computation lasts longer than the stream

    def both() -> None:
        works = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]
        compute(times)
        for work in works:
            work.wait()

    alone = median(_timed(group, device, lambda: compute(times)) for _ in range(REPEATS))
    together = median(_timed(group, device, both) for _ in range(REPEATS))
    return max(0.0, together - alone) / nbytes


def _timed(group: Any, device: torch.device, run: Callable[[], None]) -> float:
    """Seconds of a call that all ranks begin together."""
    dist.barrier(group)
    _synchronize(device)
    begin = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _agreed(group: Any, device: torch.device, value: float) -> float:
    """The largest value of all ranks."""
    largest = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest)
