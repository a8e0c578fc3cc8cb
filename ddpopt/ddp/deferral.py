"""Imposing a plan that becomes known only while the module's first forward runs.

The compiler sees a model's graphs one at a time, inside DDP's forward. The plan is complete at the end of
that forward, when DDP calls ``reducer.prepare_for_backward``. Before that call, two light placeholders
replace the module's reducer and logger:

- the logger's placeholder is always there: DDP calls the logger right before each forward that will be
  synchronized, on entering ``join()``, and before a communication hook is registered;
- the reducer's placeholder is there from such a call on, to intercept the call that ends the forward. C++
  functions may not accept it as a reducer, so it is removed while a communication hook is registered.

The decision removes both. DDP leaves reducer and logger, and so the placeholders, out of copies and pickles.

Invariant: if a decision raises, the module has its own reducer and logger back.
"""

import functools
import logging
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.agreement import exchange_plans, plan_difference, same_buckets
from ddpopt.ddp.fit import ACCUMULATES, accumulates, ddp_module, require_fit
from ddpopt.ddp.held import as_built, running_reducer
from ddpopt.ddp.reducer import WatchedLogger, install, outside_dynamo
from ddpopt.ddp.runtime_log import FORWARD_BEGINS, HOOK_REGISTERED, JOIN_BEGINS
from ddpopt.ddp.state import state_of
from ddpopt.errors import NoAnswerError, UnsupportedError
from ddpopt.graph.artifacts import show
from ddpopt.planning.plan import Plan

log = logging.getLogger("ddpopt")

FIRST_PLAN = "ddpopt: the plan of the first compiled forward"
LONGEST_WAIT = timedelta(minutes=5)
"""For the other ranks' plans. Ranks compile for different times; without a plan, training goes on."""


def defer(ddp: nn.Module, decide: Callable[[], Plan | None]) -> None:
    """Impose a plan at the end of the module's next forward that will be synchronized.

    May be called before that forward or inside it; the last call counts. The buckets are then used in
    that iteration's backward. If ranks decide differently, all use the plan of the lowest rank that has one,
    and the difference is logged: DDP also takes rank 0's order when it rebuilds its buckets.

    Call this before entering ``join()``: a rank without any input runs no forward, and learns the plan from
    the others only if it knows that there will be one.

    Args:
        ddp: the DDP module. Its forward raises any error of ``decide``, a PlanMismatchError if the plan does
            not fit or another rank's ``decide`` raised, and an InfrastructureError if the store fails. If a
            rank makes no decision within `LONGEST_WAIT`, all ranks keep DDP's own buckets, with a warning.
        decide: returns the plan, or None to keep DDP's own buckets.

    Raises:
        UsageError: ``ddp`` is not a DDP module, or has an option that leaves no buckets to plan.
    """
    module = ddp_module(ddp)
    Deferral(module, decide).begin(armed=active_module() is module)


def ended_deferral(ddp: Any) -> AbstractContextManager[None]:
    """A block in which a module gets a reducer that replaces a pending decision, if there is one."""
    return waiting.ended(ddp) if (waiting := pending(ddp)) else nullcontext()


def pending(ddp: Any) -> "Deferral | None":
    """The decision that a module waits for, if there is one."""
    deferral: Deferral | None = state_of(ddp).deferral
    # DDP replaces its logger together with its reducer
    return deferral if deferral is not None and ddp.logger is deferral.watched else None


def watch(ddp: Any, watcher: Any) -> None:
    """Let `watcher.called` know which functions of the logger DDP calls, now and with later reducers."""
    holder = ddp.logger if pending(ddp) else ddp
    holder.logger = WatchedLogger(holder.logger, watcher)


def active_module() -> DistributedDataParallel | None:
    """The DDP module whose forward is running, as Dynamo finds it.

    Up to torch 2.11 that is none once a DDP module inside another one has ended; the outer one is returned.
    """
    lost = (ddp for ddp in running_modules() if not ddp._use_python_reducer)
    return DistributedDataParallel._active_ddp_module or next(lost, None)


def running_modules() -> Iterator[DistributedDataParallel]:
    """Yield the DDP modules whose forward is on the stack, the innermost first."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code is DistributedDataParallel.forward.__code__:
            yield frame.f_locals["self"]


class Deferral:
    """One pending decision: the module's own reducer, and what was observed since.

    Attributes:
        ddp: a weak reference to the module.
        reducer: the module's own reducer.
        decide: returns the plan.
        work_handle: the handle that join() gave the reducer, which counts the ranks in this iteration.
        watched: the placeholder of the module's logger; None before it begins and once it has ended.
        placeholder: that of its reducer, if there is one.
    """

    def __init__(self, ddp: Any, decide: Callable[[], Plan | None]) -> None:
        before = pending(ddp)
        self.reducer: Any = running_reducer(ddp)
        self.ddp = weakref.ref(ddp)
        self.decide = decide
        self.work_handle: tuple[Any, bool] | None = None
        self.watched: WatchedLogger | None = None
        self.placeholder: PendingReducer | None = None
        self._used: set[int] = before._used if before else set()
        self._noting: list[Any] = before._noting if before else []

    def begin(self, armed: bool) -> None:
        """Install the logger's placeholder, and the reducer's too if a forward is running."""
        ddp: Any = self.ddp()
        state = state_of(ddp)
        state.keeps_buckets = False
        if ddp.find_unused_parameters and not ddp.static_graph and not self._noting:
            self._note_uses(ddp)
        own = ddp.logger.logger if pending(ddp) else ddp.logger
        self.watched = WatchedLogger(own, self)
        state.deferral = self
        ddp.logger = self.watched
        ddp.reducer = self.reducer
        if armed:
            self.arm()

    def _note_uses(self, ddp: Any) -> None:
        """Note which parameters a backward uses, as the reducer does under no_sync() without exposing it."""
        if accumulates(ddp):
            raise UnsupportedError(f"the buckets cannot change now: {ACCUMULATES}")
        with as_built(ddp):
            # the module's own: a planned reducer also holds those that were replaced since
            parameters, _ = ddp._build_params_for_reducer()
            nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        for node, parameter in zip(nodes, parameters, strict=True):
            note = functools.partial(_note, self._used, weakref.ref(parameter))
            self._noting.append(node.register_hook(note))

    def arm(self) -> None:
        """Install the reducer's placeholder when a forward begins."""
        ddp: Any = self.ddp()
        self.placeholder = PendingReducer(self)
        ddp.reducer = self.placeholder

    def called(self, name: str) -> None:
        """See from a call of the logger what begins."""
        if name in (FORWARD_BEGINS, JOIN_BEGINS):
            self.arm()
        elif name == HOOK_REGISTERED:
            ddp: Any = self.ddp()
            ddp.reducer = self.reducer  # until the next forward

    @contextmanager
    def ended(self, ddp: Any) -> Iterator[None]:
        """A block in which the module has its own reducer and logger back; after it no uses are noted.

        The hooks that note them put users' hooks before those of a new reducer, which `install` sees.
        """
        # The placeholders must not keep these alive: DDP's frame holds them while the new buckets are made.
        watched = ddp.logger
        ddp.reducer = self.reducer
        ddp.logger = watched.logger
        watched.logger = None
        self.reducer = None
        self.watched = None
        self.placeholder = None
        state_of(ddp).deferral = None
        try:
            yield
        finally:
            for handle in self._noting:
                handle.remove()

    def conclude(self, joined: bool) -> Any:
        """Decide, agree and install; no placeholder is left afterwards.

        Args:
            joined: whether this rank has no inputs left, and so no plan.

        Returns:
            The reducer that is now in use.
        """
        ddp: Any = self.ddp()
        with self.ended(ddp):
            plan = self._agreed(ddp, joined)
            if plan is None:
                state_of(ddp).keeps_buckets = True
            else:
                self._install(ddp, plan, joined)
        return ddp.reducer

    def _agreed(self, ddp: Any, joined: bool) -> Plan | None:
        def decide() -> Plan | None:
            plan = None if joined else self.decide()
            try:
                if plan is not None:
                    require_fit(ddp, plan)
            except UnsupportedError as error:
                log.info("ddpopt: DDP keeps its own buckets: %s", error)
                return None
            return plan

        plans: tuple[Plan | None, ...] = ()
        try:
            plans = exchange_plans(ddp.process_group, FIRST_PLAN, decide, patience(ddp.process_group))
        except NoAnswerError as error:  # a rank that is not compiled, or whose forward failed, does not ask
            log.warning("ddpopt: DDP keeps its own buckets: %s", error)
        plan = next((plan for plan in plans if plan is not None), None)
        if plan and not same_buckets(plans):
            rank = plans.index(plan)
            difference = plan_difference(plans)
            log.info("ddpopt: the ranks' plans differ; all ranks use that of rank %d:\n%s", rank, difference)
            require_fit(ddp, plan)
        return plan

    def _install(self, ddp: Any, plan: Plan, joined: bool) -> None:
        show("ddpopt_model_plan", plan.to_json, "json")
        install(ddp, plan)
        if joined:
            return
        ddp.reducer.prepare_for_forward()
        if self.work_handle is not None:
            ddp.reducer._set_forward_pass_work_handle(*self.work_handle)
        for index, parameter in enumerate(ddp.reducer.parameters):
            if id(parameter) in self._used:
                # outside of a backward, the reducer's hook only marks a parameter as used, if it has a grad
                gradient = parameter.grad
                if gradient is None:
                    parameter.grad = torch.zeros_like(parameter)
                ddp.reducer._autograd_hook(index)
                parameter.grad = gradient


def _note(used: set[int], parameter: weakref.ReferenceType[Any], *_: Any) -> None:
    """Mark a parameter as used, as DDP's own hook does after the engine has visited its node."""
    held = parameter()
    if held is not None and held.grad is not None:
        used.add(id(held))


class PendingReducer:
    """Replaces a reducer until the end of a forward. All other calls go to that reducer."""

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral

    @outside_dynamo
    def __getattr__(self, name: str) -> Any:
        return getattr(self.deferral.reducer, name)

    @outside_dynamo
    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.deferral.work_handle = work, use_static_world_size
        self.deferral.reducer._set_forward_pass_work_handle(work, use_static_world_size)

    @outside_dynamo
    def prepare_for_backward(self, output: list[torch.Tensor]) -> None:
        """Decide at the end of the forward, and let the resulting reducer expect the backward."""
        self.deferral.conclude(joined=False).prepare_for_backward(output)

    @outside_dynamo
    def _get_zeros_like_grad_buckets(self) -> Any:
        # A rank that has joined shadows its peers' first synchronized backward.
        return self.deferral.conclude(joined=True)._get_zeros_like_grad_buckets()


def patience(process_group: dist.ProcessGroup) -> timedelta:
    """How long a forward waits for the other ranks' plans.

    Half of the group's time-out, for a peer may already wait in a collective for this rank.
    """
    # Private, the same for gloo and NCCL; other backends have no readable timeout, so the default of
    # init_process_group is used.
    timeout = dist.distributed_c10d._get_default_timeout(dist.get_backend(process_group))
    for device in ("cpu", "cuda"):
        with suppress(AttributeError, RuntimeError):
            timeout = process_group._get_backend(torch.device(device)).options._timeout
            break
    return min(timeout / 2, LONGEST_WAIT)
