"""Tune the buckets of a DDP module in the first steps of its own training.

Some steps are profiled, the buckets change, and change back if steps then take longer. ddpopt sees forwards
and gradients only: a step ends where the next synchronized forward begins, and backward begins where forward
ends. Ranks count reductions, which they have in common, and rank 0 decides.

Invariant: all ranks change to the same plan before the same step, and in each the gradients are those of DDP.
"""

import logging
import weakref
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from ddpopt.ddp.agreement import same_buckets
from ddpopt.ddp.deferral import pending, watch
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.runtime_log import FORWARD_BEGINS, HOOK_REGISTERED, JOIN_BEGINS
from ddpopt.ddp.state import state_of
from ddpopt.errors import InfrastructureError, PlanMismatchError, UnsupportedError, UsageError
from ddpopt.graph.artifacts import say_once
from ddpopt.planning.limits import MIB
from ddpopt.planning.plan import Plan
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.recording import Procedure, Watch, require_profilable
from ddpopt.tuning.records import ms
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import tune

WARM_UP = 5
"""Steps that are not counted, after each change."""
PROFILED = 6
"""Steps that are profiled."""
MEASURED = 12
"""Steps that are measured before and after."""
WORTH = 1e-3
"""The buckets change if a step is expected to be shorter by more than this share."""
REFUSALS = (UsageError, PlanMismatchError)
"""Where the buckets of this rank, or of another one, cannot change."""
logger = logging.getLogger("ddpopt")


def tune_while_training(ddp: Any, strategy: str) -> None:
    """Tune a module's buckets in its next steps, unless that has begun; at INFO, it is said what came of it.

    Args:
        ddp: the DDP module, compiled so that it hands gradients over one by one. If its reducer's parameters
            are not known, nothing is tuned.
        strategy: how it is compiled.
    """
    state = state_of(ddp)
    if state.tuning is not None and state.tuning() is not None:
        return
    try:
        procedure = _tuned(Watch(ddp), strategy)
    except UnsupportedError as error:
        say_once(f"nothing is tuned: {error}", logging.INFO)
        return
    tuning = _Tuning(ddp, procedure)
    state.tuning = weakref.ref(tuning)
    watch(ddp, tuning)


class _Tuning:
    """Advances a procedure at the first synchronized forward after each reduction, however DDP is called."""

    def __init__(self, ddp: Any, procedure: Procedure[None]) -> None:
        self._ddp = weakref.ref(ddp)
        self._procedure: Procedure[None] | None = procedure
        self._stats: list[int] = []

    def called(self, name: str) -> None:
        """See from a call of the module's logger what begins; an error ends the procedure."""
        ddp: Any = self._ddp()
        procedure = self._procedure
        if procedure is None or pending(ddp):
            return
        if name == FORWARD_BEGINS:
            stats = ddp.reducer.get_backward_stats()
            if any(stats) and stats != self._stats:
                self._advance(ddp, procedure)
            else:
                self._stats = stats
        elif name in (JOIN_BEGINS, HOOK_REGISTERED) and self._stats:
            self._end(procedure, "join() was entered, or a communication hook was registered")

    def _advance(self, ddp: Any, procedure: Procedure[None]) -> None:
        self._procedure = None  # what the procedure calls itself does not advance it
        try:
            next(procedure)
        except StopIteration:
            return
        except (*REFUSALS, InfrastructureError) as error:
            self._end(procedure, error)
            return
        self._procedure = procedure
        self._stats = ddp.reducer.get_backward_stats()

    def _end(self, procedure: Procedure[None], why: object) -> None:
        self._procedure = None
        logger.info("ddpopt: nothing more is tuned: %s", why)
        procedure.close()  # it gives the former buckets back


def _tuned(watch: Watch, strategy: str) -> Procedure[None]:
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
        was_s = simulate(former, profile, link).step_s
        now_s = simulate(best, profile, link).step_s
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
    logger.info(
        "ddpopt: tuned to %s, from %s; a step is expected to take %s instead of %s",
        _sizes(plan),
        _sizes(former),
        ms(now_s),
        ms(was_s),
    )
    yield from watch.steps(WARM_UP)
    after = yield from watch.steps(MEASURED)
    was_s, was_noise_s = _centre(before)
    now_s, now_noise_s = _centre(after)
    is_longer = now_s > was_s + max(was_noise_s, now_noise_s)
    used = watch.use(lambda: former if is_longer else plan)
    outcome = "went back to the former buckets" if same_buckets([used, former]) else "the tuned buckets stay"
    logger.info(
        "ddpopt: %s: a step took %s with the tuned ones, and %s before", outcome, ms(now_s), ms(was_s)
    )


def _centre(steps: Sequence[float]) -> tuple[float, float]:
    """The median, and how far it may be off by chance: half of the distance between the quartiles."""
    low, _, high = quantiles(steps)
    return median(steps), (high - low) / 2


def _sizes(plan: Plan) -> str:
    first, last = (f"{plan.buckets[place].nbytes / MIB:.2f} MiB" for place in (0, -1))
    return f"{len(plan.buckets)} buckets (first {first}, last {last})"
