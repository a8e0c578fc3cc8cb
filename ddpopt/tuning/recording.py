"""Profiling steps on the user's ranks: when each gradient is complete, while nothing is sent.

For these steps the reducer gets a bucket for each gradient, and a hook that notes the time and keeps the bucket.
When the last one is complete, all are sent, each as it would have been. So the steps train as any others, and no
communication disturbs the computation that is measured.

Invariant: afterwards the reducer has the given plan, and the module's own communication hook.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.reducer import install
from ddpopt.planning.bucket_rule import ParamSpec, specs_from_ddp
from ddpopt.planning.plan import Bucket, Plan
from ddpopt.tuning.records import Gradient, Profile, conditions

_c10d: Any = dist  # torch does not mark its re-exports


def one_each(specs: Sequence[ParamSpec]) -> Plan:
    """A plan whose buckets hold a gradient each.

    Args:
        specs: in ready order.
    """
    return Plan(tuple(Bucket.of(i, [spec], 0, "profiled") for i, spec in enumerate(specs)), (), ())


@dataclass
class Recording:
    """The profiled steps so far.

    Attributes:
        ready: the times at which the gradients of each backward were complete, in the order of the buckets.
        forwards: when each step, its backward, the end of its backward and its end were.
    """

    ready: list[list[Any]] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)


class Clock:
    """Points in time on a device, and the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """A point in time: an event on the current stream of a GPU, else seconds."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two points."""
        if self.device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class Hold:
    """The communication hook of profiled steps."""

    def __init__(self, ddp: Any, clock: Clock, count: int) -> None:
        self._clock, self._count = clock, count
        self._send = _sender(ddp)
        self._kept: list[tuple[Any, Future[Any]]] = []
        self.times: list[Any] = []

    def __call__(self, _: object, bucket: Any) -> Future[Any]:
        if not self._kept:
            self.times = []
        self.times.append(self._clock.now())
        future: Future[Any] = Future()
        self._kept.append((bucket, future))
        if len(self._kept) == self._count:
            kept, self._kept = self._kept, []
            for held, waiting in kept:
                self._send(held).then(lambda sent, waiting=waiting: waiting.set_result(sent.value()))
        return future


def _sender(ddp: Any) -> Callable[[Any], Future[Any]]:
    if ddp._comm_hooks:
        hook, state = ddp._comm_hooks[-1]
        return lambda bucket: hook(state, bucket)
    group, size = ddp.process_group, dist.get_world_size(ddp.process_group)

    def average(bucket: Any) -> Future[Any]:
        buffer = bucket.buffer().div_(size)
        future: Future[Any] = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return average


@contextlib.contextmanager
def holding(ddp: DistributedDataParallel, specs: Sequence[ParamSpec], clock: Clock) -> Iterator[Hold]:
    """Inside this block every synchronized backward notes when its gradients are complete, and sends them last.

    Args:
        ddp: the module, between two iterations.
        specs: its parameters in ready order.
        clock: of its device.

    Yields:
        The hook, whose `times` are those of the last backward.
    """
    install(ddp, one_each(specs))
    hold = Hold(ddp, clock, len(specs))
    _c10d._register_comm_hook(ddp.reducer, None, hold)
    yield hold


def profiled(
    ddp: Any, specs: Sequence[ParamSpec], steps: int, step: "Step", strategy: str, device: torch.device
) -> Profile:
    """Profile some steps of a module.

    Args:
        ddp: the DDP module.
        specs: its parameters in ready order.
        steps: how many to measure, after one that is not.
        step: runs the parts of a step.
        strategy: how the module is compiled.
        device: of the module.

    Returns:
        The profile of this rank: medians over the steps.
    """
    clock = Clock(device)
    ready, parts = [], []
    with holding(ddp, specs, clock) as hold:
        for number in range(steps + 1):
            dist.barrier(ddp.process_group)
            begin = clock.now()
            loss = step.forward()
            between = clock.now()
            step.backward(loss)
            end = clock.now()
            step.update()
            last = clock.now()
            if number:
                ready.append([clock.between(between, at) for at in hold.times])
                sent = clock.between(hold.times[-1], end)
                parts.append((clock.between(begin, between), ready[-1][-1], clock.between(end, last), sent))
    columns = [median(column) for column in zip(*parts, strict=True)]
    times = [median(column) for column in zip(*ready, strict=True)]
    gradients = tuple(Gradient(spec, at) for spec, at in zip(specs, times, strict=True))
    return Profile(
        gradients, columns[0], columns[1], columns[2], strategy, dist.get_world_size(ddp.process_group), conditions()
    )


class Step:
    """The parts of a training step."""

    def __init__(self, forward: Callable[[], Any], backward: Callable[[Any], None], update: Callable[[], None]):
        self.forward, self.backward, self.update = forward, backward, update
