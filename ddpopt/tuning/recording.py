"""Measuring the steps of a training: how long they take, and when each gradient is complete.

What is measured is a course: a generator that yields where a step of the training must run, and that may
change the buckets between two steps. `run` runs a course with a function for the step;
`ddpopt.tuning.compiling` advances one at each forward of the user's own training.

In profiled steps the reducer has a bucket for each gradient, and a hook that notes the time and keeps the
bucket. When the last one is complete, all are sent, each as it would have been. So these steps train as any
others, and no communication disturbs the computation that is measured.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from ddpopt.ddp.agreement import agree
from ddpopt.ddp.deferral import LONGEST_WAIT
from ddpopt.ddp.fit import require_between_iterations
from ddpopt.ddp.reducer import install, outside_dynamo
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.model_graphs import specs_by_id
from ddpopt.planning.plan import Plan
from ddpopt.tuning.records import Gradient, Profile
from ddpopt.tuning.stored import conditions
from ddpopt.tuning.tune import plan_of

_c10d: Any = dist  # torch does not mark its re-exports
Value = TypeVar("Value")
TRIES = 10
Course = Generator[None, None, Value]


def run(course: Course[Value], step: Callable[[], object]) -> Value:
    """Run a course with a function that trains one step."""
    while True:
        try:
            next(course)
        except StopIteration as ended:
            value: Value = ended.value
            return value
        step()


def one_each(specs: Sequence[ParamSpec]) -> Plan:
    """A plan whose buckets hold a gradient each."""
    return plan_of(([spec] for spec in specs), "profiled")


def largest(group: dist.ProcessGroup, values: Sequence[float]) -> list[float]:
    """Of each value the largest of all ranks; each must call this with as many.

    Raises:
        InfrastructureError: a rank did not answer in time.
    """
    texts = agree(group, "ddpopt: times of all ranks", json.dumps([*values]), LONGEST_WAIT)
    return [max(each) for each in zip(*map(json.loads, texts), strict=True)]


def now(device: torch.device) -> Any:
    """A point in time: an event on the current stream of a GPU, else seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch types it not
    event.record()
    return event


def between(begin: Any, end: Any) -> float:
    """Seconds between two points; waits for the second on a GPU."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class Watch:
    """A DDP module in training, whose steps are measured.

    Args:
        ddp: the module.

    Attributes:
        device: of its parameters.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        self.device: torch.device = next(ddp.module.parameters()).device
        self._forward: Any = None
        self._stats: Any = None

    def watched(self, forward: Callable[..., Any], begin: Callable[[], None]) -> Callable[..., Any]:
        """`forward`, with `begin` before the first synchronized one after each backward; its end is noted.

        A backward that reduced is what all ranks have in common: one of them may run more forwards.
        """

        @outside_dynamo
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not (torch.is_grad_enabled() and self.ddp.require_backward_grad_sync):
                return forward(*args, **kwargs)
            if self.ddp.reducer.get_backward_stats() != self._stats:
                begin()
            try:
                return forward(*args, **kwargs)
            finally:
                self._stats, self._forward = self.ddp.reducer.get_backward_stats(), now(self.device)

        return watched

    def steps(self, count: int) -> Course[list[float]]:
        """Let some steps run; returns how long each took, in seconds."""
        points = [now(self.device)]
        for _ in range(count):
            yield
            points.append(now(self.device))
        return [between(*pair) for pair in itertools.pairwise(points)]

    def settled(self, tries: int = sys.maxsize) -> Course[None]:
        """Let steps run until the buckets may change on all ranks; raises UsageError after so many."""
        for _ in range(tries):
            problem = ""
            try:
                require_between_iterations(self.ddp)
            except UsageError as error:  # perhaps on this rank only
                problem = str(error)
            if not any(largest(self.ddp.process_group, [bool(problem)])):
                return
            yield
        raise UsageError(problem or "the buckets of another rank cannot change now")

    def ready_order(self) -> list[ParamSpec]:
        """The parameters in the order in which their gradients were complete in the last backward.

        It is equal on all ranks, whose own orders may differ; each must call this.
        """
        specs = [*specs_by_id(self.ddp).values()]
        at = largest(self.ddp.process_group, self.ddp.reducer.get_backward_stats())
        return [specs[place] for place in sorted(range(len(specs)), key=at.__getitem__)]

    def profiled(
        self, order: Sequence[ParamSpec], steps: int, strategy: str, rows: list[Any] | None = None
    ) -> Course[Profile]:
        """Profile some steps, after one that is not; afterwards the reducer needs another plan.

        Args:
            order: the parameters in ready order.
            steps: how many, with those in `rows`.
            strategy: how the module runs.
            rows: what earlier calls measured, and this one adds to.

        Returns:
            The profile, equal on all ranks.
        """
        yield from self.settled(TRIES)
        hold = self._holding(order)
        yield
        rows = [] if rows is None else rows
        while len(rows) < steps:
            hold.kept, hold.times, begin = [], [], now(self.device)  # an earlier backward may have failed
            yield
            if len(hold.times) == len(order):  # there was a backward
                ready = [(self._forward, at) for at in hold.times]
                rows.append([(begin, self._forward), (hold.sent, now(self.device)), *ready])
        own = [[between(*pair) for pair in row] for row in rows]
        forward_s, update_s, *ready_s = slowest(own, self.ddp.process_group, self.device)
        gradients = tuple(Gradient(spec, at) for spec, at in zip(order, ready_s, strict=True))
        size = dist.get_world_size(self.ddp.process_group)
        return Profile(gradients, forward_s, ready_s[-1], update_s, strategy, size, conditions())

    def _holding(self, order: Sequence[ParamSpec]) -> Hold:
        """Give the reducer a bucket for each gradient, and a hook that keeps them."""
        hold, hooks = Hold(self.ddp, self.device, len(order)), _hooks(self.ddp)
        # the last of them is registered
        with patch.object(self.ddp, "_comm_hooks", [(hold, None)] if hooks else self.ddp._comm_hooks):
            install(self.ddp, one_each(order))
        if not hooks:
            _c10d._register_comm_hook(self.ddp.reducer, None, hold)
        return hold


def slowest(rows: Sequence[Sequence[float]], group: Any, device: torch.device) -> list[float]:
    """Medians of the columns, if of each value the largest of all ranks counts; each must call this."""
    times = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    medians: list[float] = times.quantile(0.5, 0).tolist()
    return medians


def require_profilable(ddp: Any) -> None:
    """Check that steps of a module can be profiled with other buckets; raises UsageError."""
    named, states = ddp._get_ddp_logging_data().get("comm_hook"), [state for _, state in _hooks(ddp)]
    skips = getattr(ddp, "skip_all_reduce_unused_params", False)
    reasons = {
        "under join() ranks may stop at any step": ddp._join_config.enable,
        "skip_all_reduce_unused_params skips buckets that others would wait for": skips,
        "a communication hook in C++ cannot be held back": named and not states,
        "a communication hook with a state, such as PowerSGD's, may depend on the buckets": not all(
            state is None or isinstance(state, dist.ProcessGroup) for state in states
        ),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError("; ".join(why))


def _hooks(ddp: Any) -> list[tuple[Any, Any]]:
    """The communication hooks in Python; a copy lists those of its original, which it does not have."""
    return [*ddp._comm_hooks] if ddp._get_ddp_logging_data().get("comm_hook") else []


class Hold:
    """The communication hook of profiled steps.

    Attributes:
        kept: the buckets of this backward so far, and what the reducer waits for.
        times: when each bucket of the last backward was complete.
        sent: when all were back.
    """

    def __init__(self, ddp: Any, device: torch.device, count: int) -> None:
        self._device, self._count = device, count
        # the module's own hook, or what the reducer does without any
        self._hook, self._state = (_hooks(ddp) or [(allreduce_hook, ddp.process_group)])[-1]
        self.kept: list[tuple[Any, Future[Any]]] = []
        self.times: list[Any] = []
        self.sent: Any = None

    def __call__(self, _: object, bucket: Any) -> Future[Any]:
        """Keep a bucket, or after the last one send all; an error of sending is raised here."""
        self.times.append(now(self._device))
        future: Future[Any] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        self.kept.append((bucket, future))
        if len(self.kept) == self._count:
            sending = [self._hook(self._state, held) for held, _ in self.kept]
            received = [each.wait() for each in sending]
            self.sent = now(self._device)
            for (_, waiting), value in zip(self.kept, received, strict=True):
                waiting.set_result(value)
            self.kept = []
        return future
