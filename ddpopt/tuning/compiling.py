"""``ddpopt.compile``: `ddpopt.dynamo.api.compile` with buckets from a file, or tuned in the first steps.

Tuning profiles some steps of the training, changes the buckets, and changes them back if steps take longer.
ddpopt sees forwards and gradients only: a step ends where the next synchronized forward begins, and backward
begins where forward ends. Ranks count reductions, which they have in common, and rank 0 decides.

Invariant: all ranks change to the same plan before the same step, and in each the gradients are those of DDP.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Literal

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ddpopt.ddp.deferral import LONGEST_WAIT, PendingLogger
from ddpopt.ddp.fit import ddp_within
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.ddp.plan_exchange import exchange_plans, same_buckets
from ddpopt.ddp.reducer import outside_dynamo
from ddpopt.dynamo import api
from ddpopt.errors import InfrastructureError, PlanMismatchError, UsageError
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.bucket_rule import specs_from_ddp
from ddpopt.planning.limits import MIB
from ddpopt.planning.plan import Plan
from ddpopt.planning.strategy import Strategy, require_choice
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.recording import Course, Watch, one_each, require_profilable
from ddpopt.tuning.records import Link, Profile, ms, read
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import tune

Buckets = Literal["plan", "ddp", "auto"]
WHAT = "ddpopt.compile(plan=...)"
WARM_UP, PROFILED, MEASURED = 5, 6, 12
"""Steps that are not counted, that are profiled, and that are measured before and after."""
WORTH = 1e-3
"""The buckets change if a step is expected to be shorter by more than this share."""
REFUSALS = (UsageError, PlanMismatchError)
"""Where the buckets of this rank, or of another one, cannot change."""
ENDS = {
    "_set_uneven_input_join": "join() was entered",
    "_set_comm_hook_name": "a communication hook was registered",
}
"""What ends the tuning, by the logger's function that DDP calls before it."""
logger = logging.getLogger("ddpopt")


def compile(  # the public name, as in torch.compile
    ddp_model: nn.Module,
    *,
    backend: str | CompilerFn = "inductor",
    strategy: Strategy = "auto",
    buckets: Buckets = "plan",
    plan: Plan | str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Compile a DDP module so that its gradients still overlap with backward.

    Args:
        ddp_model: a ``DistributedDataParallel`` module, or a wrapper that contains one (Fabric's, your own);
            the code of a wrapper is compiled too.
        backend: name of a Dynamo backend, or a callable ``(gm, example_inputs) -> callable``.
        strategy: ``"split"``: one compiled segment for each time a bucket completes; ``"inline"``: one
            compiled graph, whose backward hands the gradients to DDP; ``"auto"``: like ``"inline"``. A graph
            that cannot be compiled inline is split, and the reason is logged (as a warning if ``"inline"``
            was requested).
        buckets: ``"plan"``: the reducer follows the plan, from the first iteration; ``"ddp"``: the reducer
            is not changed; ``"auto"``: the first steps are measured, and the reducer gets the buckets that
            are expected to make a step shortest. If steps then take longer, it gets the plan's again. Both
            decisions are logged at INFO.
        plan: buckets to use, as a plan, or a file that ``ddpopt tune`` or `Plan.to_json` wrote; the same on
            every rank. Only with ``buckets="plan"``.
        options: passed to ``torch.compile`` (``dynamic``, ``mode``, …). ``fullgraph`` applies to the module
            inside DDP: its forward must not break. DDP's own Python code cannot be part of a graph.

    Returns:
        A callable like `ddp_model`, with its attributes.

    Raises:
        UsageError: an argument cannot be used.
        UnsupportedError: this release of torch lacks a private name that ddpopt uses.
        PlanMismatchError: `plan` does not fit the module, or differs between ranks.
        InfrastructureError: `plan` was given, and a rank did not make this call in time.
        RuntimeError: Inductor does not know the mode or one of the options; the message is torch's.
    """
    require_choice("buckets", buckets, Buckets)
    ddp: Any = ddp_within(ddp_model)
    if plan is not None:
        if buckets != "plan":
            raise UsageError(f"plan: expected buckets='plan' with it, got {buckets!r}; leave one of them out")
        own: Any = exchange_plans(
            ddp.process_group, WHAT, lambda: _read_plan(plan, ddp, strategy), LONGEST_WAIT
        )
        impose(ddp, own[ddp.process_group.rank()])
    open_or_given: Any = "open" if buckets == "auto" else buckets
    module = api.compile(ddp_model, backend=backend, strategy=strategy, buckets=open_or_given, **options)
    if buckets == "auto":
        _tune_in_training(module, ddp, strategy)
    return module


def _read_plan(plan: Plan | str | os.PathLike[str], ddp: Any, strategy: Strategy) -> Plan:
    if isinstance(plan, Plan):
        return plan
    text = read("plan", plan)
    if '"ddpopt_profile"' in text:  # a file of ``ddpopt tune`` says for what its plan was tuned
        profile, link = Profile.from_file("plan", plan), Link.from_file("plan", plan)
        specs, own = specs_from_ddp(ddp), "inline" if strategy == "auto" else strategy
        devices = [spec.device.partition(":")[0] for spec in (profile.gradients[0].spec, specs[0])]
        ranks = link.world_size, ddp.process_group.size()
        others = {"device": devices, "strategy": (profile.strategy, own), "ranks": ranks}
        profile.require_fit(f"plan {os.fspath(plan)}", specs, others)
    return Plan.from_json(text)


def _tune_in_training(module: Any, ddp: Any, strategy: Strategy) -> None:
    """Tune the buckets of a compiled module in its next steps."""
    if not isinstance(module, OptimizedModule):
        logger.info("ddpopt: nothing is tuned: torch.compile is disabled")
        return
    tuning, forward = _Tuning(Watch(ddp), strategy), module.forward

    @outside_dynamo
    def attaching(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        if not tuning.attach() and module.forward is attaching:  # else it is wrapped
            module.forward = forward
        return found

    module.forward = attaching
    again = {**module._compile.keywords, "buckets": "auto"}
    module.__dict__["_compile"] = functools.partial(compile, **again)


class _Tuning:
    """Advances a course at the first synchronized forward after each reduction, however DDP is called."""

    def __init__(self, watch: Watch, strategy: Strategy) -> None:
        self.ddp = watch.ddp
        self._course: Course[None] | None = _tuned(watch, strategy)
        self._stats: Any = None

    def attach(self) -> bool:
        """Watch the module's logger, if nothing else does; false after the end."""
        if self._course and not isinstance(self.ddp.logger, PendingLogger | WatchedLogger):
            self._stats = self.ddp.reducer.get_backward_stats()
            self.ddp.logger = WatchedLogger(self.ddp.logger, self)
        return self._course is not None

    def advance(self) -> None:
        """Advance the course, if there was a reduction since."""
        stats, self._stats = self._stats, self.ddp.reducer.get_backward_stats()
        if self._course is None or stats == self._stats:
            return
        try:
            next(self._course)
        except StopIteration:
            self._course = None
        except (*REFUSALS, InfrastructureError) as ended:
            self.end(str(ended), logging.WARNING if isinstance(ended, InfrastructureError) else logging.INFO)
        self.attach()

    def end(self, why: str, level: int = logging.INFO) -> None:
        """End the course, which gives the former buckets back while it profiles."""
        if self._course:
            logger.log(level, "ddpopt: nothing more is tuned: %s", why)
            self._course.close()
        self._course = None


class WatchedLogger:
    """Replaces a logger, whose functions DDP calls when a forward begins, and before what is in `ENDS`."""

    def __init__(self, logger: Any, tuning: _Tuning) -> None:
        self.logger, self.tuning = logger, weakref.ref(tuning)

    @outside_dynamo
    def __getattr__(self, name: str) -> Any:
        """A function of the logger that the module then has."""
        tuning, logger = self.tuning(), self
        if tuning and name in ENDS:
            tuning.end(ENDS[name])
        elif tuning and name == "set_runtime_stats_and_log" and tuning.ddp.logger is self:
            tuning.advance()
        if tuning and not isinstance(tuning.ddp.logger, PendingLogger):
            logger = tuning.ddp.logger
        return getattr(self.logger if logger is self else logger, name)


def _tuned(watch: Watch, strategy: Strategy) -> Course[None]:
    """The steps in which a module is tuned; raises UsageError where it cannot be."""
    ddp = watch.ddp
    yield from watch.steps(WARM_UP)
    former = imposed_plan(ddp)
    if former is None:
        raise UsageError("DDP keeps its own buckets")
    if ddp.gradient_as_bucket_view:
        raise UsageError("with gradient_as_bucket_view, a gradient's memory would change")
    require_profilable(ddp)
    before = yield from watch.steps(MEASURED)
    plan = former
    try:
        watch.use(lambda: former, holds=True)
        order = yield from watch.within(watch.ready_order)
        watch.use(lambda: one_each(order), holds=True)
        profile = yield from watch.profiled(order, PROFILED, strategy)
        link = yield from watch.within(lambda: measure_link(ddp.process_group, watch.device))
        plan = tune(profile, link)
        was_s, now_s = (simulate(each, profile, link).step_s for each in (former, plan))
        if now_s > was_s * (1 - WORTH):
            plan = former
        plan = watch.use(lambda: plan)
    except REFUSALS:
        while watch.hold:  # it stays until the buckets of all ranks can change
            try:
                watch.use(lambda: former)
            except REFUSALS:
                yield
        raise
    finally:
        if watch.hold:
            watch.install(former)
    if same_buckets([plan, former]):
        logger.info("ddpopt: the buckets stay: a step of %s expected, at best %s", ms(was_s), ms(now_s))
        return
    said = _sizes(plan), _sizes(former), ms(now_s), ms(was_s)
    logger.info("ddpopt: tuned to %s, from %s; a step is expected to take %s instead of %s", *said)
    yield from watch.steps(WARM_UP)
    after = yield from watch.steps(MEASURED)
    (was_s, noise_s), (now_s, other_noise_s) = _centre(before), _centre(after)
    slower = now_s > was_s + max(noise_s, other_noise_s)
    slower = same_buckets([watch.use(lambda: former if slower else plan), former])
    done = "went back to the former buckets" if slower else "the tuned buckets stay"
    logger.info("ddpopt: %s: a step took %s with the tuned ones, and %s before", done, ms(now_s), ms(was_s))


def _centre(steps: Sequence[float]) -> tuple[float, float]:
    """The median, and how far it may be off by chance: half of the distance between the quartiles."""
    low, _, high = quantiles(steps)
    return median(steps), (high - low) / 2


def _sizes(plan: Plan) -> str:
    first, last = (f"{plan.buckets[place].nbytes / MIB:.2f} MiB" for place in (0, -1))
    return f"{len(plan.buckets)} buckets (first {first}, last {last})"
