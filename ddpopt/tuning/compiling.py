"""``ddpopt.compile``: `ddpopt.dynamo.api.compile` with buckets from a file, or tuned in the first steps.

Tuning profiles some steps of the training, changes the buckets, and changes them back if steps take longer.
ddpopt sees forwards and gradients only: a step ends where the next synchronized forward begins, and backward
begins where forward ends.

Invariant: all ranks change to the same plan before the same step, and in each the gradients are those of DDP.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Literal

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ddpopt.ddp.deferral import LONGEST_WAIT
from ddpopt.ddp.fit import ddp_within
from ddpopt.ddp.impose import impose, imposed_plan
from ddpopt.ddp.plan_exchange import exchange_plans
from ddpopt.dynamo import api
from ddpopt.errors import UsageError
from ddpopt.graph.nodes import CompilerFn
from ddpopt.planning.bucket_rule import specs_from_ddp
from ddpopt.planning.limits import MIB
from ddpopt.planning.plan import Plan
from ddpopt.planning.strategy import Strategy, require_choice
from ddpopt.tuning.measure_link import measure_link
from ddpopt.tuning.recording import Course, Watch, largest, require_profilable
from ddpopt.tuning.records import Link, Profile, ms
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.stored import read
from ddpopt.tuning.tune import tune

Buckets = Literal["plan", "ddp", "auto"]
WHAT = "ddpopt.compile(plan=...)"
WARM_UP, PROFILED, MEASURED = 5, 6, 12
"""Steps that are not counted, that are profiled, and that are measured before and after."""
WORTH = 1e-3
"""The buckets change if a step is expected to be shorter by more than this share."""
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
    watch, forward = Watch(ddp), module.forward
    course = _tuned(watch, strategy)

    def begin() -> None:
        try:
            next(course)
        except (StopIteration, UsageError) as ended:
            if module.forward is watched:  # else it is wrapped
                module.forward = forward
            if isinstance(ended, UsageError):
                logger.info("ddpopt: nothing is tuned: %s", ended)

    module.forward = watched = watch.watched(forward, begin)
    again = {**module._compile.keywords, "buckets": "auto"}
    module.__dict__["_compile"] = functools.partial(compile, **again)


def _tuned(watch: Watch, strategy: Strategy) -> Course[None]:
    """The steps in which a module is tuned; raises UsageError where it cannot be."""
    ddp, group = watch.ddp, watch.ddp.process_group
    yield from watch.steps(WARM_UP)
    former = imposed_plan(ddp)
    if former is None:
        raise UsageError("DDP keeps its own buckets")
    if ddp.static_graph:
        raise UsageError("a static graph's forward may be under way, which a new reducer would not reduce")
    require_profilable(ddp)
    before = yield from watch.steps(MEASURED)
    profile = yield from watch.profiled(watch.ready_order(), PROFILED, strategy)
    yield from watch.settled()
    impose(ddp, former)
    link = measure_link(group, watch.device)
    plan = tune(profile, link)
    was_s, now_s = (simulate(each, profile, link).step_s for each in (former, plan))
    if now_s > was_s * (1 - WORTH):
        logger.info("ddpopt: the buckets stay: a step of %s expected, at best %s", ms(was_s), ms(now_s))
        return
    impose(ddp, plan, timeout=LONGEST_WAIT)  # tuning takes longer on some ranks
    said = _sizes(plan), _sizes(former), ms(now_s), ms(was_s)
    logger.info("ddpopt: tuned to %s, from %s; a step is expected to take %s instead of %s", *said)
    yield from watch.steps(WARM_UP)
    after = yield from watch.steps(MEASURED)
    was_s, noise_s, now_s, other_noise_s = largest(group, [*_centre(before), *_centre(after)])
    slower = now_s > was_s + max(noise_s, other_noise_s)
    if slower:
        yield from watch.settled()
        impose(ddp, former)
    done = "went back to the former buckets" if slower else "the tuned buckets stay"
    logger.info("ddpopt: %s: a step took %s with the tuned ones, and %s before", done, ms(now_s), ms(was_s))


def _centre(steps: Sequence[float]) -> tuple[float, float]:
    """The median, and how far it may be off by chance: half of the distance between the quartiles."""
    low, _, high = quantiles(steps)
    return median(steps), (high - low) / 2


def _sizes(plan: Plan) -> str:
    first, last = (f"{plan.buckets[place].nbytes / MIB:.2f} MiB" for place in (0, -1))
    return f"{len(plan.buckets)} buckets (first {first}, last {last})"
