"""Drawn models under DDP on one rank: eager buckets are those of the rule, compiled steps are eager ones."""

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import event, example, given
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.reducer_buckets import running_buckets
from ddpopt.fuzz.questions import Answer, Outcome, Setting
from ddpopt.judge.judging.reference import Bench
from ddpopt.judge.modes import Mode
from ddpopt.planning.bucket_rule import initial_buckets, rebuilt_buckets, specs_from_ddp
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.testing.strategies import models
from tests.found import OURS, examined
from tests.profiles import share
from tests.property.stepping import (
    MARKS,
    STRATEGIES,
    Run,
    eager,
)

pytestmark = MARKS

# A residual in a residual and a graph break between them: plain aot_eager sums a gradient in another order.
INNER = step("residual", body=(step("linear"),))
NESTED = DrawnModel(steps=(step("residual", body=(step("linear"), step("graph_break"), INNER)),))
# A float that only symbols are known of is computed again behind a cut, where grad is off.
FLOAT_WITHOUT_GRAD = DrawnModel(
    steps=(
        step("linear"),
        step("scale", of="float"),
        step("embedding", gradient="sparse"),
        step("no_grad", body=(step("scale", of="float"),)),
    ),
    cap_bytes=1,
)
# The first graph trains nothing, and the second one reads a weight twice on either side of a cut.
SILENT_FIRST = DrawnModel(
    steps=(
        step("running"),
        step("graph_break"),
        step("transformed", layer="again"),
        step("transformed", layer="tied"),
    ),
    cap_bytes=1,
)
TIED = DrawnModel(steps=(step("linear"), step("linear", layer="tied"), step("batch_norm")))
# The last graph trains nothing, and what it is given was computed from parameters.
SILENT_LAST = DrawnModel(
    steps=(
        step(
            "looked_up",
            1,
            by="bag",
            read="returned",
            body=(step("batch_norm", 1, layer="tied"), step("linear", 2, layer="tied", bias=False)),
        ),
        step("graph_break", 5),
    ),
    outputs=(step("input_view"), step("input_itself"), step("places")),
    returns="dict",
    leaves="hooked",
    training="forward_in_no_sync",
    width=4,
    batches=(3,),
    cap_bytes=1,
)
# Another order of sums leads to what several segments read: next to a view, or to an input alone.
BASE_AND_VIEW = DrawnModel(
    steps=(
        step("conv1d"),
        step("submodule", body=(step("scale"), step("embedding", 5))),
        step("conv", 1),
    ),
    width=4,
    cap_bytes=1,
)
INPUT_ALONE = DrawnModel(
    steps=(
        step("empty"),
        step("write_late"),
        step("statistics", by="torch", read="saved", body=(step("bfloat16_linear", 5),)),
        step("activation", 1),
        step("linear"),
    ),
    takes="dict",
    leaves="trained",
    width=4,
    cap_bytes=1,
)
# Dynamo takes a complex view behind a graph break for one of pairs.
NOT_COMPILED = DrawnModel(steps=(step("fourier", of="value"), step("graph_break"), step("linear")))


@share(0.06)
@given(models(without={"cond"}, max_steps=5))
@example(NESTED)
@example(FLOAT_WITHOUT_GRAD)
@example(SILENT_FIRST)
@example(TIED)
@example(SILENT_LAST)
@example(NOT_COMPILED)
@example(BASE_AND_VIEW)
@example(INPUT_ALONE)
def test_a_compiled_step_leaves_behind_what_an_eager_one_does_by_the_plan_that_was_foretold(
    alone: Ranks, drawn: DrawnModel
) -> None:
    plans: dict[str, Plan | None] = {}
    run = Bench.run

    def noted(bench: Bench, how: Mode, *more: Any, **options: Any) -> Any:
        record = run(bench, how, *more, **options)
        plans[how.name] = getattr(record, "plan", None)
        return record

    with patch.object(Bench, "run", noted):
        assert_right(examined(alone, drawn, *OURS, setting=Setting("aot_eager", lowers_limit=False)))
    args, kwargs = drawn.program.inputs()
    limits = drawn.program.module.DDP_KWARGS
    for strategy in STRATEGIES if drawn.training == "default" else ():
        plan = plans.get(f"ddpopt-{strategy}")
        torch._dynamo.reset()
        event(f"{strategy}: {'nothing was planned' if plan is None else 'planned'}")
        if plan is not None:
            assert plan == ddpopt.plan(drawn.program.model(), *args, strategy=strategy, **kwargs, **limits)


def assert_right(answers: list[Answer]) -> None:
    """Require eager DDP's step of each mode, where torch alone can compile the model in one piece."""
    for answer in answers:
        event(answer.kind)
        right = answer.kind in (Outcome.OK, Outcome.BACKEND)
        assert right or answer.detail.startswith("nothing was judged"), answer


# ---------------------------------------------------------------------------------------- eager buckets

SPARSE = DrawnModel(
    steps=(step("linear"), step("linear", layer="tied"), step("embedding", gradient="sparse"))
)
STEPS = 3
"""The reducer has rebuilt its buckets by then."""


def in_buckets(ddp: DistributedDataParallel) -> list[tuple[str, ...]]:
    return [bucket.params for bucket in running_buckets(ddp)]


def train(run: Run) -> list[str]:
    """Run some steps; the parameters in the order in which the first of them completed their gradients."""
    ready: list[str] = []
    names = {id(param): name for name, param in run.model.named_parameters()}
    hooks = [
        param.register_post_accumulate_grad_hook(lambda p: ready.append(names[id(p)]))  # type: ignore[no-untyped-call]
        for param in run.model.parameters()
        if param.requires_grad
    ]
    for number in range(STEPS):
        run.forward(number)
        run.backward()
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(ready))


@share(0.5)
@given(models(without={"cond"}))
@example(SPARSE)
def test_the_reducers_buckets_are_those_of_the_rule(drawn: DrawnModel) -> None:
    run = Run(drawn, eager)
    ready = train(run)
    config, specs = BucketConfig.from_ddp(run.ddp), specs_from_ddp(run.ddp)
    if config.rebuilds:
        by_name = {spec.name: spec for spec in specs}
        ordered = [by_name[name] for name in ready if name in by_name]
        expected = rebuilt_buckets(ordered, config)
    else:
        event("the reducer never rebuilds")
        ordered, expected = list(specs), initial_buckets(specs, config)
    found = in_buckets(run.ddp)
    assert found == [tuple(ordered[place].name for place in bucket) for bucket in expected]
