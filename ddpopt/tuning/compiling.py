"""``ddpopt.compile``: `ddpopt.dynamo.api.compile` with buckets from a file, or tuned in the first steps.

Tuning profiles some steps of the training, changes the buckets, and changes them back if steps take longer.
ddpopt sees forwards and gradients only: a step ends where the next synchronized forward begins, and backward
begins where forward ends. Ranks count reductions, which they have in common, and rank 0 decides.

Invariant: all ranks change to the same plan before the same step, and in each the gradients are those of DDP.
"""

import functools
import logging
import os
import weakref
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Literal

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ddpopt.ddp.agreement import same_buckets
from ddpopt.ddp.deferral import LONGEST_WAIT, pending, watch, watchers
from ddpopt.ddp.fit import ddp_within
from ddpopt.ddp.impose import impose_decided, imposed_plan
from ddpopt.dynamo import api
from ddpopt.errors import InfrastructureError, PlanMismatchError, UsageError, require_choice
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.limits import MIB
from ddpopt.planning.plan import Plan, Strategy
from ddpopt.planning.stored import read
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.recording import Course, Watch, require_profilable
from ddpopt.tuning.records import Link, Profile, ms
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import tune

Buckets = Literal["plan", "ddp", "auto"]
WARM_UP, PROFILED, MEASURED = 5, 6, 12
"""Steps that are not counted, that are profiled, and that are measured before and after."""
WORTH = 1e-3
"""The buckets change if a step is expected to be shorter by more than this share."""
REFUSALS = (UsageError, PlanMismatchError)
"""Where the buckets of this rank, or of another one, cannot change."""
FORWARD, *ENDS = "set_runtime_stats_and_log", "_set_uneven_input_join", "_set_comm_hook_name"
"""The logger's function that DDP calls when a synchronized forward begins, and those that end the tuning."""
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
        UnsupportedError: this release of torch lacks a private name that ddpopt uses, or the module was made
            with ``delay_all_reduce_named_params``.
        PlanMismatchError: `plan` does not fit the module, or differs between ranks.
        InfrastructureError: `plan` was given, and a rank did not make this call in time.
        RuntimeError: Inductor does not know the mode or one of the options; the message is torch's.
    """
    require_choice("buckets", buckets, Buckets)
    ddp: Any = ddp_within(ddp_model)
    if plan is not None:
        if buckets != "plan":
            raise UsageError(f"plan: expected buckets='plan' with it, got {buckets!r}; leave one of them out")
        api.backend_of(backend, strategy, "plan", options)  # before anything changes
        impose_decided(ddp, lambda: _read_plan(plan, ddp, strategy), LONGEST_WAIT)
    open_or_given: Any = "open" if buckets == "auto" else buckets
    module = api.compile(ddp_model, backend=backend, strategy=strategy, buckets=open_or_given, **options)
    if buckets == "auto" and not isinstance(module, OptimizedModule):
        logger.info("ddpopt: nothing is tuned: torch.compile is disabled")
    elif buckets == "auto":
        if not any(isinstance(watcher, _Tuning) for watcher in watchers(ddp)):
            watch(ddp, _Tuning(ddp, _tuned(Watch(ddp), strategy)))
        again = {**module._compile.keywords, "buckets": buckets}
        module.__dict__["_compile"] = functools.partial(compile, **again)
    return module


def _read_plan(plan: Plan | str | os.PathLike[str], ddp: Any, strategy: Strategy) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if '"ddpopt_profile"' in read("plan", plan):  # a file of ``ddpopt tune`` says for what its plan was tuned
        profile, link = Profile.from_file("plan", plan), Link.from_file("plan", plan)
        devices = profile.gradients[0].spec.device.partition(":")[0], next(ddp.parameters()).device.type
        strategies = profile.strategy, "inline" if strategy == "auto" else strategy
        ranks, where = (link.world_size, ddp.process_group.size()), f"plan {os.fspath(plan)}"
        profile.require_fit(where, device=devices, strategy=strategies, ranks=ranks)
    return Plan.from_file("plan", plan)


class _Tuning:
    """Advances a course at the first synchronized forward after each reduction, however DDP is called."""

    def __init__(self, ddp: Any, course: Course[None]) -> None:
        self._ddp = weakref.ref(ddp)
        self._course: Course[None] | None = course
        self._stats: list[int] = []

    def called(self, name: str) -> None:
        """See from a call of the module's logger what begins; an error ends the course."""
        ddp: Any = self._ddp()
        course = self._course
        if course is None or name not in (FORWARD, *ENDS) or pending(ddp):
            return
        self._course = None  # what the course calls itself does not advance it
        stats, started = ddp.reducer.get_backward_stats(), bool(self._stats)
        try:
            if name in ENDS and started:
                raise UsageError("join() was entered, or a communication hook was registered")
            if name == FORWARD and any(stats) and stats != self._stats:
                next(course)
        except StopIteration:
            return
        except (*REFUSALS, InfrastructureError) as ended:
            logger.info("ddpopt: nothing more is tuned: %s", ended)
            course.close()  # it gives the former buckets back
            return
        self._course, self._stats = course, ddp.reducer.get_backward_stats()


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
    try:
        watch.use(watch.one_each, holds=True)
        profile = yield from watch.profiled(PROFILED, strategy)
        link = yield from watch.within(lambda: measure_link(ddp.process_group, watch.device))
        best = tune(profile, link)
        was_s, now_s = (simulate(each, profile, link).step_s for each in (former, best))
        plan = watch.use(lambda: best if now_s <= was_s * (1 - WORTH) else former)
    except REFUSALS:
        while watch.is_holding:  # it stays until the buckets of all ranks can change
            try:
                watch.use(lambda: former)
            except REFUSALS:
                yield
        raise
    finally:
        if watch.is_holding:
            watch.install(former)
    if same_buckets([plan, former]):
        logger.info("ddpopt: the buckets stay: a step of %s expected, at best %s", ms(was_s), ms(now_s))
        return
    said = _sizes(plan), _sizes(former), ms(now_s), ms(was_s)
    logger.info("ddpopt: tuned to %s, from %s; a step is expected to take %s instead of %s", *said)
    yield from watch.steps(WARM_UP)
    after = yield from watch.steps(MEASURED)
    (was_s, noise_s), (now_s, other_noise_s) = _centre(before), _centre(after)
    used = watch.use(lambda: former if now_s > was_s + max(noise_s, other_noise_s) else plan)
    done = "went back to the former buckets" if same_buckets([used, former]) else "the tuned buckets stay"
    logger.info("ddpopt: %s: a step took %s with the tuned ones, and %s before", done, ms(now_s), ms(was_s))


def _centre(steps: Sequence[float]) -> tuple[float, float]:
    """The median, and how far it may be off by chance: half of the distance between the quartiles."""
    low, _, high = quantiles(steps)
    return median(steps), (high - low) / 2


def _sizes(plan: Plan) -> str:
    first, last = (f"{plan.buckets[place].nbytes / MIB:.2f} MiB" for place in (0, -1))
    return f"{len(plan.buckets)} buckets (first {first}, last {last})"
