"""Hypothesis strategies: parameter lists, DDP's bucket limits, small forward graphs.

What is drawn is valid by construction: limits that DDP accepts, graphs that run forward and backward on real
tensors.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.limits import BucketConfig
from tests.support.graph_builder import GraphBuilder, SmallGraph
from tests.support.graph_steps import OUTPUTS, STEPS, Sketch

# Small ones; and where sums of sizes meet the caps below, with their neighbors.
_ELEMENTS = (0, 1, 2, 3, 255, 256, *(k * 2**16 + off for k in (1, 2, 3, 4, 8, 20) for off in (-1, 0, 1)))
# (elements, which of the drawn groups, sparse): one in sixteen is sparse. One draw each, for there are many.
_GRADIENTS = st.sampled_from([(n, g, face == 15) for face in range(16) for g in range(4) for n in _ELEMENTS])
_DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128", "float8_e5m2")
_DEVICES = ("cpu", "cuda:0", "cuda:1")
_GROUPS = tuple((dtype, device) for device in _DEVICES for dtype in _DTYPES)
_CAPS_MB = (25, 1, 0.25, 0.3, 0.5, 0.75, 1.5, 2.5, 2**-18, 1e-7)


@st.composite
def parameter_lists(draw: st.DrawFn) -> tuple[ParamSpec, ...]:
    """Draw the parameters of a model, in the reducer's order.

    1 to 24 of them, of 0 to 20 MiB, of up to four (dtype, device) groups, some with a sparse gradient.
    Nothing is allocated.
    """
    groups = draw(st.lists(st.sampled_from(_GROUPS), min_size=1, max_size=4))
    gradients = draw(st.lists(_GRADIENTS, min_size=1, max_size=24))
    return tuple(
        _spec(f"layers.{place}.weight", elements, *groups[group % len(groups)], sparse=sparse)
        for place, (elements, group, sparse) in enumerate(gradients)
    )


def _spec(name: str, elements: int, dtype: str, device: str, *, sparse: bool) -> ParamSpec:
    itemsize: int = getattr(torch, dtype).itemsize
    return ParamSpec(name, elements * itemsize, dtype, device, sparse)


def bucket_configs() -> st.SearchStrategy[BucketConfig]:
    """Draw bucket limits, as DDP has them for some arguments, or with ``DDP_SET_LAST_BUCKET_CAP``."""
    caps = st.sampled_from(_CAPS_MB)
    arguments: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
        {},
        optional={
            "bucket_cap_mb": caps,
            "bucket_cap_mb_list": st.lists(caps, max_size=4),
            "find_unused_parameters": st.booleans(),
            "static_graph": st.booleans(),
        },
    )
    configs = arguments.map(lambda given: BucketConfig.from_kwargs(**given))
    return st.builds(lambda made, die: replace(made, small_last_bucket=die == 7), configs, st.integers(0, 7))


@st.composite
def graphs(draw: st.DrawFn) -> SmallGraph:
    """Draw a small forward graph as Dynamo would leave it: parameters are placeholders, values are fake.

    Its steps are `STEPS`, twelve at most, of one to six nodes each; among its outputs are views of others and
    of the input, and sizes. The number of rows may be a symbol. At least one output requires a gradient.

    A dropout may be dead: run eagerly it moves the generator, compiled it is gone, so compare random values
    only between two eager or two compiled runs.
    """
    sketch = Sketch(draw, draw(_builders()))
    weight = sketch.builder.parameter(sketch.layer(), "weight", 4, 4)
    sketch.values.append(sketch.builder.call(torch._C._nn.linear, sketch.builder.x, weight))
    for step in draw(st.lists(st.sampled_from(STEPS), max_size=12)):
        made = step(sketch)
        if made is not None:
            sketch.values.append(made)
    if draw(st.booleans()):
        sketch.values.append(_sum_of_unread(sketch))
    # The first linear's result is always differentiable; what else is returned may not be.
    outputs: list[fx.Node] = []
    for output in draw(st.lists(st.sampled_from(OUTPUTS), max_size=3)):
        outputs += output(sketch)
    sketch.builder.evaluate()
    return sketch.builder.finish(*outputs, _last_differentiable(sketch.values))


@st.composite
def _builders(draw: st.DrawFn) -> GraphBuilder:
    """Rows that are a number, or (some) a symbol."""
    if not draw(st.sampled_from((*[False] * 15, True))):
        return GraphBuilder(batch=draw(st.integers(1, 3)), width=4)
    return GraphBuilder(batch=draw(st.integers(2, 3)), width=4, symbolic=True)


def _sum_of_unread(sketch: Sketch) -> fx.Node:
    """Leave no value dead: most models do not, and a dead reader hides what its parameter asks of a plan."""
    total = sketch.values[-1]
    for value in sketch.values[:-1]:
        if not value.users:
            total = sketch.builder.call(operator.add, total, value)
    return total


def _last_differentiable(values: list[fx.Node]) -> fx.Node:
    return next(value for value in reversed(values) if value.meta["example_value"].requires_grad)
