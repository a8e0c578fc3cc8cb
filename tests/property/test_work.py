"""What planning, cutting and proving cost, counted in calls: twice the graph is twice the work.

Calls are counted and no clock is read, so that a busy machine does not change what is found.
"""

import operator
import sys
from collections.abc import Callable
from types import FrameType

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch.utils import _pytree as pytree

from ddpopt.planning.limits import BucketConfig
from ddpopt.planning.planner import plan_graph
from ddpopt.split.partition import partition
from ddpopt.strategies.quiet import gc_paused
from tests.support.drawn_graphs import cut_wherever_it_can_be, facts_of, prove, small_configs
from tests.support.graph_builder import GraphBuilder, SmallGraph
from tests.support.graph_steps import STEPS, Sketch, Step
from tests.support.profiles import share

ROUNDS = 6
"""How often the smaller graph repeats its steps; the larger one does so twice as often."""
SLACK = 1.4
"""Of the work for each node and each tensor that it reads: values are drawn, so not all rounds are equal."""


@st.composite
def pairs_of_graphs(draw: st.DrawFn) -> tuple[SmallGraph, SmallGraph]:
    """A graph that repeats some steps, and one that repeats them twice as often."""
    steps = draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=4))
    return _repeated(draw, steps * ROUNDS), _repeated(draw, steps * (2 * ROUNDS))


def _repeated(draw: st.DrawFn, steps: list[Step]) -> SmallGraph:
    sketch = Sketch(draw, GraphBuilder(batch=2, width=4))
    sketch.values.append(sketch.builder.call(operator.mul, sketch.builder.x, sketch.vector()))
    for step in steps:
        made = step(sketch)
        if made is not None:
            sketch.values.append(made)
    return sketch.builder.finish(*sketch.values[1:])


def size(graph: SmallGraph) -> int:
    """Nodes, those of the bodies of calls too, and tensors that they read."""
    graphs = [module.graph for module in graph.gm.modules() if isinstance(module, fx.GraphModule)]
    nodes = [node for each in graphs for node in each.nodes]
    read = [source.meta.get("example_value") for node in nodes for source in node.all_input_nodes]
    return len(nodes) + sum(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(read))


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, of Python's and of C's."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    with gc_paused():  # Hypothesis and others have functions called at each collection
        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(before)
    return count


def works(graph: SmallGraph, config: BucketConfig) -> dict[str, int]:
    facts, everywhere = facts_of(graph), cut_wherever_it_can_be(graph)
    stitched = partition(graph.gm, everywhere)
    return {
        "facts": calls(lambda: facts_of(graph)),
        "plan": calls(lambda: plan_graph(facts, config)),
        "partition": calls(lambda: partition(graph.gm, everywhere)),
        "certificate": calls(lambda: prove(graph, stitched, everywhere)),
    }


@share(0.3)
@given(pairs_of_graphs(), small_configs())
def test_twice_the_graph_is_twice_the_work(pair: tuple[SmallGraph, SmallGraph], config: BucketConfig) -> None:
    smaller, larger = (works(graph, config) for graph in pair)
    growth = size(pair[1]) / size(pair[0])
    for what, before in smaller.items():
        assert larger[what] <= SLACK * growth * before, f"{what}: {before}, then {larger[what]} calls"
