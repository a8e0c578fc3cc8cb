"""Drawn models under DDP on one rank: eager buckets are those of the rule, compiled steps are eager ones."""

from functools import partial
from typing import Any

import torch
from hypothesis import event, example, given
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.reducer_buckets import running_buckets
from ddpopt.planning.bucket_rule import initial_buckets, rebuilt_buckets, specs_from_ddp
from ddpopt.planning.limits import BucketConfig
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.testing.strategies import models
from tests.profiles import share
from tests.property.examples import with_found_models
from tests.property.stepping import (
    MARKS,
    STRATEGIES,
    Run,
    Strategy,
    Wrap,
    assert_equal_steps,
    compiled,
    eager,
    trained,
    where_torch_compiles,
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
@partial(with_found_models, compiles=True)
def test_a_compiled_step_leaves_behind_what_an_eager_one_does_in_the_buckets_that_were_planned(
    drawn: DrawnModel,
) -> None:
    expected = trained(drawn, eager)
    with where_torch_compiles(drawn):
        for strategy in STRATEGIES:
            made: list[DistributedDataParallel] = []
            assert_equal_steps(drawn, noting(made, compiled(strategy)), expected)
            assert_has_the_planned_buckets(made[0], drawn, strategy)


def noting(made: list[DistributedDataParallel], wrap: Wrap) -> Wrap:
    """The same wrap, and each module that it is given."""

    def noted(ddp: DistributedDataParallel) -> Any:
        made.append(ddp)
        return wrap(ddp)

    noted.__name__ = wrap.__name__
    return noted


def assert_has_the_planned_buckets(
    ddp: DistributedDataParallel, drawn: DrawnModel, strategy: Strategy
) -> None:
    torch._dynamo.reset()
    args, kwargs = drawn.program.inputs()
    limits = drawn.program.module.DDP_KWARGS
    plan = ddpopt.plan(drawn.program.model(), *args, strategy=strategy, **kwargs, **limits)
    sent = {spec.name for spec in specs_from_ddp(ddp)}
    if any(param.grad is not None for name, param in ddp.module.named_parameters() if name in sent):
        assert imposed_plan(ddp) == plan
        assert in_buckets(ddp) == [bucket.params for bucket in plan.buckets]
    else:
        event("nothing that is sent is trained, so nothing was planned")


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
@with_found_models
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
