"""Drawn models under DDP on one rank: eager buckets are those of the rule, compiled steps are eager ones."""

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import event, example, given

import ddpopt
from ddpopt.fuzz.cases import read_model
from ddpopt.fuzz.questions import Setting
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.rules.bench import Bench
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.testing.strategies import models
from tests.support.found import FOLDER, OURS, assert_right, examined
from tests.support.profiles import share
from tests.support.rehearsing import assert_buckets_as_predicted
from tests.support.stepping import MARKS, STRATEGIES, Run, eager

pytestmark = MARKS
Test = Callable[..., None]


def with_pinned_models(test: Test) -> Test:
    """Try a property on each model that it was once found to fail for."""
    rows = json.loads((FOLDER.parent / "pinned_models.json").read_text(encoding="utf-8"))
    for row in rows:
        test = example(read_model(row["model"]))(test)
    return test


@share(0.02)
@given(models(without={"cond"}, max_steps=5))
@with_pinned_models
def test_a_compiled_step_is_an_eager_one_and_has_the_predicted_plan(alone: Ranks, drawn: DrawnModel) -> None:
    plans: dict[str, Plan | None] = {}
    run = Bench.run

    def noted(bench: Bench, how: Engine, *more: Any, **options: Any) -> Any:
        record = run(bench, how, *more, **options)
        plans[how.name] = getattr(record, "plan", None)
        return record

    with patch.object(Bench, "run", noted):
        assert_right(drawn, examined(alone, drawn, *OURS, setting=Setting("aot_eager", lowers_limit=False)))
    args, kwargs = drawn.program.inputs()
    limits = drawn.program.module.DDP_KWARGS
    for strategy in STRATEGIES if drawn.training == "default" else ():
        plan = plans.get(f"ddpopt-{strategy}")
        torch._dynamo.reset()
        event(f"{strategy}: {'nothing was planned' if plan is None else 'planned'}")
        if plan is not None:
            assert plan == ddpopt.plan(drawn.program.model(), *args, strategy=strategy, **kwargs, **limits)


# ---------------------------------------------------------------------------------------- eager buckets

SPARSE = DrawnModel((step("linear"), step("linear", layer="tied"), step("embedding", gradient="sparse")))


@share(0.5)
@given(models(without={"cond"}))
@example(SPARSE)
def test_the_reducers_buckets_are_those_of_the_rule(drawn: DrawnModel) -> None:
    run = Run(drawn, eager)

    def train(number: int) -> None:
        run.forward(number)
        run.backward()

    if not assert_buckets_as_predicted(run.ddp, train).rebuilds:
        event("the reducer never rebuilds")
