"""Measuring the steps of a training: how long they take, and when each gradient is complete.

What is measured is a course: a generator that yields where a step of the training must run, and that may
change the buckets between two steps. `run` runs a course with a function for the step;
`ddpopt.tuning.compiling` advances one at each forward of the user's own training.

In profiled steps the reducer has a bucket for each gradient, and a hook that notes the time and keeps the
bucket. When the last one is complete, all are sent, each as it would have been. So these steps train as any
others, and no communication disturbs the computation that is measured.

Invariant: ranks communicate here only through the group's store, with a limit, or within a reduction, which
all of them have in common; so nothing waits for a rank for which DDP would not wait.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Generator, Sequence
from types import FunctionType
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from ddpopt.ddp.agreement import agree
from ddpopt.ddp.deferral import LONGEST_WAIT, patience
from ddpopt.ddp.fit import require_between_iterations
from ddpopt.ddp.plan_exchange import exchange_plans
from ddpopt.ddp.reducer import install
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.model_graphs import specs_by_id
from ddpopt.planning.plan import Plan
from ddpopt.tuning.records import Gradient, Profile, conditions
from ddpopt.tuning.tune import plan_of

_c10d: Any = dist  # torch does not mark its re-exports
Value = TypeVar("Value")
WHAT = "ddpopt: tuned buckets"
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
        hold: the communication hook, while the reducer has one of ours.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        self.device = torch.device(next(iter(specs_by_id(ddp).values())).device)
        self.hold: Hold | None = None

    def steps(self, count: int) -> Course[list[float]]:
        """Let some steps run; returns how long each took, in seconds."""
        points = [now(self.device)]
        for _ in range(count):
            yield
            points.append(now(self.device))
        return [between(*pair) for pair in itertools.pairwise(points)]

    def use(self, choose: Callable[[], Plan], *, holds: bool = False) -> Plan:
        """Give the buckets that rank 0 chooses to all ranks.

        Args:
            choose: returns the buckets; called on rank 0.
            holds: whether the reducer gets a hook that holds them.

        Returns:
            The buckets.

        Raises:
            UsageError: this rank's cannot change now.
            PlanMismatchError: another rank's cannot.
            InfrastructureError: a rank did not answer in time.
        """

        def decide() -> Plan | None:
            require_between_iterations(self.ddp)
            return choose() if group.rank() == 0 else None

        group = self.ddp.process_group
        plan: Any = exchange_plans(group, WHAT, decide, patience(group))[0]
        self.install(plan, holds=holds)
        return plan  # type: ignore[no-any-return]  # rank 0 has one

    def install(self, plan: Plan, *, holds: bool = False) -> None:
        """Give this rank's reducer other buckets; the others must do the same before their next reduction."""
        hooks = _hooks(self.ddp)
        hold = self.hold = Hold(self.ddp, self.device, len(plan.buckets)) if holds else None
        registered = [(hold, None)] if hold and hooks else self.ddp._comm_hooks  # the last of them
        with patch.object(self.ddp, "_comm_hooks", registered):
            install(self.ddp, plan)
        if hold and not hooks:
            _c10d._register_comm_hook(self.ddp.reducer, None, hold)

    def within(self, call: Callable[[], Value]) -> Course[Value]:
        """Call a function within the next reduction, on all ranks; the reducer holds its buckets."""
        found = list[Value]()
        self._held.last = lambda: found.append(call())
        yield from self._step()
        return found[0]

    @property
    def _held(self) -> Hold:
        assert self.hold is not None
        return self.hold

    def _step(self) -> Course[Any]:
        """Let a step run whose buckets are held; returns when it began."""
        begin = self._held.begin()
        yield
        if not self._held.is_complete:
            raise UsageError("a step did not reduce its gradients")
        return begin

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
        """Profile some steps, between two that are not; the buckets are `one_each`, and held.

        Args:
            order: the parameters in ready order.
            steps: how many, with those in `rows`.
            strategy: how the module runs.
            rows: what earlier calls measured, and this one adds to.

        Returns:
            The profile, equal on all ranks.

        Raises:
            UsageError: a step did not reduce.
        """
        yield
        rows = [] if rows is None else rows
        for _ in range(steps - len(rows)):
            begin = yield from self._step()
            ready = [between(begin, at) for at in self._held.times]
            rows.append((self._forward_s(), between(self._held.sent, now(self.device)), ready))
        own = [
            [forward_s, update_s, *(at - forward_s for at in ready)] for forward_s, update_s, ready in rows
        ]
        group = self.ddp.process_group
        forward_s, update_s, *ready_s = yield from self.within(lambda: slowest(own, group, self.device))
        gradients = tuple(Gradient(spec, at) for spec, at in zip(order, ready_s, strict=True))
        size = dist.get_world_size(group)
        return Profile(gradients, forward_s, ready_s[-1], update_s, strategy, size, conditions())

    def _forward_s(self) -> float:
        """The time of the last forward, from DDP's log, which is sampled."""
        self.ddp._set_ddp_runtime_logging_sample_rate(1)
        self.ddp.logger.set_runtime_stats_and_log()
        return float(self.ddp._get_ddp_logging_data()["forward_compute_time"]) / 1e9


def slowest(rows: Sequence[Sequence[float]], group: Any, device: torch.device) -> list[float]:
    """Medians of the columns, if of each value the largest of all ranks counts; each must call this."""
    times = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    medians: list[float] = times.quantile(0.5, 0).tolist()
    return medians


def require_profilable(ddp: Any) -> None:
    """Check that steps of a module can be profiled with other buckets; raises UsageError."""
    named, hooks = ddp._get_ddp_logging_data().get("comm_hook"), _hooks(ddp)
    skips = getattr(ddp, "skip_all_reduce_unused_params", False)
    reasons = {
        "under join() ranks may stop at any step": ddp._join_config.enable,
        "skip_all_reduce_unused_params skips buckets that others would wait for": skips,
        "a communication hook in C++ cannot be held back": named and not hooks,
        "a communication hook with a state, such as PowerSGD's, may depend on the buckets": not all(
            (state is None or isinstance(state, dist.ProcessGroup)) and _is_stateless(hook)
            for hook, state in hooks
        ),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError("; ".join(why))


def _is_stateless(hook: Any) -> bool:
    """Whether a hook is a function that closes over nothing but such functions."""
    cells = getattr(hook, "__closure__", None) or ()
    return isinstance(hook, FunctionType) and all(_is_stateless(cell.cell_contents) for cell in cells)


def _hooks(ddp: Any) -> list[tuple[Any, Any]]:
    """The communication hooks in Python; a copy lists those of its original, which it does not have."""
    return [*ddp._comm_hooks] if ddp._get_ddp_logging_data().get("comm_hook") else []


class Hold:
    """The communication hook of steps in which the buckets are held.

    Attributes:
        kept: the buckets of this backward so far, and what the reducer waits for.
        times: when each bucket of the last backward was complete.
        sent: when all were back.
        last: called once, when all are back; it may use collectives.
    """

    def __init__(self, ddp: Any, device: torch.device, count: int) -> None:
        self._device, self._count = device, count
        # the module's own hook, or what the reducer does without any
        self._hook, self._state = (_hooks(ddp) or [(allreduce_hook, ddp.process_group)])[-1]
        self.kept: list[tuple[Any, Future[Any]]] = []
        self.times: list[Any] = []
        self.sent: Any = None
        self.last: Callable[[], object] | None = None

    def begin(self) -> Any:
        """Forget an earlier step; returns the time."""
        self.kept, self.times = [], []
        return now(self._device)

    @property
    def is_complete(self) -> bool:
        """Whether all buckets came since."""
        return len(self.times) == self._count

    def __call__(self, _: object, bucket: Any) -> Future[Any]:
        """Keep a bucket, or after the last one send all; an error of sending is raised here."""
        if not self.kept:
            self.times = []
        self.times.append(now(self._device))
        future: Future[Any] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        self.kept.append((bucket, future))
        if self.is_complete:
            sending = [self._hook(self._state, held) for held, _ in self.kept]
            received = [each.wait() for each in sending]
            self.sent, last, self.last = now(self._device), self.last, None
            if last:
                last()
            for (_, waiting), value in zip(self.kept, received, strict=True):
                waiting.set_result(value)
            self.kept = []
        return future
