"""The buckets of drawn models, as planned and as the running reducer has them: one rank, in this process."""

import torch
from hypothesis import event, example, given, target

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.reducer_buckets import running_buckets
from ddpopt.planning.bucket_rule import initial_buckets, rebuilt_buckets, specs_from_ddp
from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.strategy import Strategy
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.testing.strategies import models
from tests.profiles import share
from tests.property.examples import with_found_models, with_found_models_that_compile
from tests.property.stepping import MARKS, Run, eager, where_torch_compiles

pytestmark = MARKS
SPARSE = DrawnModel(
    steps=(step("linear"), step("linear", layer="tied"), step("embedding", gradient="sparse"))
)
STEPS = 3
"""The reducer has rebuilt its buckets by then."""


def in_buckets(run: Run) -> list[tuple[str, ...]]:
    return [bucket.params for bucket in running_buckets(run.ddp)]


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
    found = in_buckets(run)
    target(float(max(map(len, found)) - min(map(len, found))), label="skew of buckets")
    assert found == [tuple(ordered[place].name for place in bucket) for bucket in expected]


SILENT_FIRST = DrawnModel(steps=(step("running"), step("graph_break"), step("linear")))
"""Its first graph trains nothing."""
NOT_COMPILED = DrawnModel(steps=(step("fourier", of="value"), step("graph_break"), step("linear")))
"""Dynamo takes a complex view behind a graph break for one of pairs."""


@share(0.04)
@given(models(without={"cond"}, max_steps=5))
@example(SILENT_FIRST)
@example(NOT_COMPILED)
@with_found_models_that_compile
def test_the_reducer_has_the_buckets_that_were_planned(drawn: DrawnModel) -> None:
    strategy: Strategy = "split" if len(drawn.steps) % 2 else "auto"
    with where_torch_compiles(drawn):
        torch._dynamo.reset()
        args, kwargs = drawn.program.inputs()
        limits = drawn.program.module.DDP_KWARGS
        plan = ddpopt.plan(drawn.program.model(), *args, strategy=strategy, **kwargs, **limits)
        torch._dynamo.reset()
        run = Run(drawn, lambda ddp: ddpopt.compile(ddp, backend="eager", strategy=strategy))
        train(run)
        sent = {spec.name for spec in specs_from_ddp(run.ddp)}
        if any(param.grad is not None for name, param in run.model.named_parameters() if name in sent):
            assert imposed_plan(run.ddp) == plan
            assert in_buckets(run) == [bucket.params for bucket in plan.buckets]
        else:
            event("nothing that is sent is trained, so nothing was planned")
