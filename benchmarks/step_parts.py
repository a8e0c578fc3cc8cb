"""The parts of a training step, each measured alone: what no step can be faster than.

Invariant: nothing is sent while a part of the computing is measured, and nothing computed while sending is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.devices import elapsed, elapsed_together, now
from benchmarks.step_modes import Mode
from ddpopt.ddp.reducer_buckets import running_buckets


class Parts:
    """Measures the parts.

    Args:
        whole: computes; its graph is compiled whole, and no gradient is sent.
        eager: tells when in backward the first bucket is complete.

    Attributes:
        buffers: as much as each of eager's buckets, in their order.
    """

    def __init__(self, whole: Mode, eager: Mode) -> None:
        self._whole = whole
        self._eager = eager
        buckets = running_buckets(eager.ddp)
        self.buffers = [torch.zeros(bucket.numel, device=eager.device) for bucket in buckets]
        parameters = dict(eager.ddp.module.named_parameters())
        self._first_bucket = [parameters[name] for name in buckets[0].params]

    def measure(self) -> dict[str, float]:
        """Measure each once.

        Returns:
            Seconds of ``forward``, ``backward``, ``update``, ``comm`` and ``last_bucket``; and
            ``first_bucket``, the share of the backward after which the first bucket is complete.
        """
        device = self._whole.device
        return {
            **self._compute(),
            "first_bucket": self._share_until_first_bucket(),
            "comm": elapsed_together(lambda: _all_reduce(self.buffers), device),
            "last_bucket": elapsed_together(lambda: _all_reduce(self.buffers[-1:]), device),
        }

    def _compute(self) -> dict[str, float]:
        mode = self._whole
        phases = {"forward": mode.forward, "backward": mode.backward, "update": mode.update}
        with mode.ddp.no_sync():
            mode.step()
            dist.barrier()
            return {name: elapsed(phase, mode.device) for name, phase in phases.items()}

    def _share_until_first_bucket(self) -> float:
        mode = self._eager
        ready: list[float] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _: ready.append(now(mode.device)))
            for parameter in self._first_bucket
        ]
        with mode.ddp.no_sync():
            mode.forward()
            start = now(mode.device)
            backward_s = elapsed(mode.backward, mode.device)
            mode.update()
        for handle in handles:
            handle.remove()
        return (max(ready) - start) / backward_s


def _all_reduce(buffers: Sequence[Tensor]) -> None:
    """All at once and in order, as DDP launches them."""
    launched = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    for work in launched:
        work.wait()
