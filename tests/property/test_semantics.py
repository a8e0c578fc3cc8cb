"""Drawn models, compiled under DDP: a step leaves behind what an eager one does."""

import pytest
import torch
from hypothesis import example, given, target

from ddpopt.ranks.group import one_rank
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.testing.strategies import models
from tests.profiles import share
from tests.property.stepping import (
    MARKS,
    STRATEGIES,
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


@share(0.04)
@given(models(without={"cond"}, max_steps=5))
@example(NESTED)
@example(FLOAT_WITHOUT_GRAD)
@example(SILENT_FIRST)
@example(TIED)
def test_a_compiled_step_leaves_behind_what_an_eager_one_does(drawn: DrawnModel) -> None:
    expected = trained(drawn, eager)
    with where_torch_compiles(drawn):
        for strategy in STRATEGIES:
            assert_equal_steps(drawn, compiled(strategy), expected)
    target(float(len(drawn.features)), label="features")


@pytest.mark.nightly
@share(0.03)
@given(models(without={"cond", "graph-break"}, max_steps=4))
def test_a_step_compiled_by_inductor_passes_the_ladder(drawn: DrawnModel) -> None:
    from ddpopt.judge.runner import verify_here  # imports Inductor

    for strategy in ("split", "inline"):
        torch._dynamo.reset()
        with one_rank():
            verify_here(drawn.case(), strategy=strategy, backend="inductor", steps=2).require()
