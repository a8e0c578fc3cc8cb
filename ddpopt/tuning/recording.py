"""Measuring the steps of a training: how long they take, and when each gradient is complete.

What is measured is a procedure: a generator that yields where a step of the training must run, and that may
change the buckets between two steps. `ddpopt.tuning.comparing` runs a procedure with steps of its own;
`ddpopt.tuning.online` advances one at each forward of the user's own training.

In profiled steps the reducer has a bucket for each gradient, and a hook that notes the time and keeps the
bucket. When the last one is complete, all are sent, each as it would have been. So these steps train as any
others, and no communication disturbs the computation that is measured.

Invariant: ranks communicate here only through the group's store, with a limit, or within a reduction, which
all of them have in common; so nothing waits for a rank for which DDP would not wait.
"""

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from types import FunctionType
from typing import Any, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from ddpopt.ddp.agreement import exchange_plans
from ddpopt.ddp.deferral import patience
from ddpopt.ddp.fit import require_between_iterations
from ddpopt.ddp.held import planned_reducer
from ddpopt.ddp.reducer import install
from ddpopt.ddp.runtime_log import log_every_iteration, log_of_this_iteration
from ddpopt.ddp.specs import specs_by_id
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Plan
from ddpopt.tuning.records import Gradient, Profile, conditions
from ddpopt.tuning.tune import plan_of

Value = TypeVar("Value")
Procedure = Generator[None, None, Value]


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
        hold: the communication hook, a `Hold`, while the reducer has one of ours; else None.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp
        self.device = torch.device(next(iter(specs_by_id(ddp).values())).device)
        self.hold: Any = None
        # of each profiled step, when the update, forward and each gradient ended after the last reduction:
        # ranks begin together there, and wait for one another in the next one only
        self._rows: list[list[float]] = []

    def steps(self, count: int) -> Procedure[list[float]]:
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
        plan: Any = exchange_plans(group, "ddpopt: tuned buckets", decide, patience(group))[0]
        self.install(plan, holds=holds)
        return plan  # type: ignore[no-any-return]  # rank 0 has one

    def install(self, plan: Plan, *, holds: bool = False) -> None:
        """Give this rank's reducer other buckets; the others must do the same before their next reduction."""
        self.hold = Hold(self.ddp, self.device) if holds else None
        self._plan = plan
        install(self.ddp, plan, self.hold)

    @property
    def is_holding(self) -> bool:
        """Whether the reducer has our hook; not once the user has imposed other buckets."""
        planned = planned_reducer(self.ddp)
        return self.hold is not None and planned is not None and planned.plan == self._plan

    def one_each(self) -> Plan:
        """A bucket for each gradient, in the order in which they were complete in the last backward.

        Raises:
            UsageError: parameters were replaced after the module was wrapped.
        """
        at = self.ddp.reducer.get_backward_stats()
        ready = sorted(zip(at, self._specs(), strict=True), key=lambda each: each[0])
        return plan_of(([spec] for _, spec in ready), "profiled")

    def _specs(self) -> list[ParamSpec]:
        """What the reducer reduces, in its order; raises UsageError if the module has lost a part of it."""
        reduced = len(self.ddp.reducer.get_backward_stats())
        specs = [*specs_by_id(self.ddp).values()]
        if len(specs) != reduced:
            raise UsageError(
                f"DDP reduces {reduced} parameters, and its module has {len(specs)} of them: some were "
                "replaced; wrap the module in DDP again"
            )
        return specs

    def within(self, call: Callable[[], Value]) -> Procedure[Value]:
        """Call a function within the next reduction, on all ranks; the reducer holds its buckets.

        Raises:
            UsageError: the next step did not reduce.
        """
        found = list[Value]()
        self.hold.last = lambda: found.append(call())
        yield
        if not found:
            raise UsageError("a step did not reduce its gradients, or other buckets were imposed")
        return found[0]

    def profiled(self, steps: int, strategy: str) -> Procedure[Profile]:
        """Profile some more steps, between two that are not; the buckets are those of `one_each`, and held.

        Args:
            steps: how many.
            strategy: how the module runs.

        Returns:
            The profile of all steps so far, equal on all ranks.

        Raises:
            UsageError: a step did not reduce.
        """
        yield
        for _ in range(steps):
            sent = self.hold.sent
            begin = now(self.device)
            log_every_iteration(self.ddp)
            yield
            forward_s = float(log_of_this_iteration(self.ddp)["forward_compute_time"]) / 1e9
            update_s, *ends = (between(sent, at) for at in (begin, *self.hold.times))
            self._rows.append([update_s, update_s + forward_s, *ends])
        group = self.ddp.process_group
        update_s, begin, *ends = yield from self.within(lambda: slowest(self._rows, group, self.device))
        ready = [end - begin for end in ends]
        specs = {spec.name: spec for spec in self._specs()}  # other ranks do not wait, if this fails
        order = [specs[bucket.params[0]] for bucket in self.ddp.reducer.plan.buckets]
        gradients = tuple(map(Gradient, order, ready))
        return Profile(gradients, begin - update_s, ready[-1], update_s, strategy, group.size(), conditions())


def slowest(rows: Sequence[Sequence[float]], group: Any, device: torch.device) -> list[float]:
    """Medians of the columns, if of each value the largest of all ranks counts; each must call this."""
    times = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group)
    return [*map(float, times.quantile(0.5, 0))]


def require_profilable(ddp: Any) -> None:
    """Check that steps of a module can be profiled with other buckets; raises UsageError."""
    hook, state = _own_hook(ddp)
    is_function = isinstance(hook, FunctionType) and not hook.__closure__
    held = hook is _without_hook or (is_function and isinstance(state, dist.ProcessGroup | None))
    reasons = {
        "under join() ranks may stop at any step": ddp._join_config.enable,
        "skip_all_reduce_unused_params skips buckets": getattr(ddp, "skip_all_reduce_unused_params", False),
        "a communication hook in C++ or with a state, such as PowerSGD's, cannot be held back": not held,
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        raise UsageError("; ".join(why))


def _own_hook(ddp: Any) -> tuple[Any, Any]:
    """The module's communication hook, or one like the reducer without any; None for one in C++."""
    if not ddp._get_ddp_logging_data().get("comm_hook"):  # a copy still lists the hooks of its original
        return _without_hook, ref(ddp)
    return ddp._comm_hooks[-1] if ddp._comm_hooks else (None, None)


def _without_hook(ddp: Any, bucket: Any) -> Future[Any]:
    return allreduce_hook(ddp().process_group, bucket)  # the group that it has now


class Hold:
    """The communication hook of steps in which the buckets are held until the last one is complete.

    Attributes:
        times: when each bucket of the last backward was complete.
        sent: when all were back.
        last: called once, when all are back; it may use collectives.
    """

    def __init__(self, ddp: Any, device: torch.device) -> None:
        self._hook, self._state = _own_hook(ddp)
        self._device = device
        self._kept: list[tuple[Any, Future[Any]]] = []
        self.times: list[Any] = []
        self.sent: Any = now(device)
        self.last: Callable[[], object] | None = None

    def __call__(self, _: object, bucket: Any) -> Future[Any]:
        """Keep a bucket, or after the last one send all; an error of sending is raised here."""
        if not self._kept:
            self.times = []
        self.times.append(now(self._device))
        future: Future[Any] = Future(devices=[self._device] if self._device.type == "cuda" else None)
        self._kept.append((bucket, future))
        if bucket.is_last():
            kept = self._kept
            self._kept = []
            sending = [self._hook(self._state, held) for held, _ in kept]
            received = [each.wait() for each in sending]
            self.sent = now(self._device)
            last = self.last
            self.last = None
            if last:
                last()
            for (_, waiting), value in zip(kept, received, strict=True):
                waiting.set_result(value)
        return future
