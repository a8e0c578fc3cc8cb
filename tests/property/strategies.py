"""Hypothesis strategies: parameter lists, DDP arguments and bucket limits, small forward graphs, and models.

All generators that are public are here, whichever module makes them. What is drawn is valid by construction:
limits that DDP accepts, graphs and models that run forward and backward on real tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from hypothesis import event
from hypothesis import strategies as st
from torch import fx

from ddpopt.planning.bucket_rule import BucketConfig, ParamSpec
from ddpopt.planning.plan import Plan, Policy
from ddpopt.testing.strategies import chosen_features
from tests.graph_builder import GraphBuilder, SmallGraph
from tests.property.graph_sketch import Sketch
from tests.property.graph_steps import OUTPUTS, STEPS
from tests.property.plan_strategies import plan_of

Maker = TypeVar("Maker", bound=Callable[..., Any])

# Small ones; and where sums of sizes meet the caps below, with their neighbours.
_ELEMENTS = (0, 1, 2, 3, 255, 256, *(k * 2**16 + off for k in (1, 2, 3, 4, 8, 20) for off in (-1, 0, 1)))
# (elements, which of the drawn groups, sparse): one in sixteen is sparse. One draw each, for there are many.
_GRADIENTS = st.sampled_from([(n, g, face == 15) for face in range(16) for g in range(4) for n in _ELEMENTS])
_DTYPES = ("float32", "bfloat16", "float16", "float64", "complex64", "complex128", "float8_e5m2")
_DEVICES = ("cpu", "cuda:0", "cuda:1")
_GROUPS = tuple((dtype, device) for device in _DEVICES for dtype in _DTYPES)
SYMBOLIC = "symbolic batch"
"""The feature of a graph whose number of rows is a symbol."""
_CAPS_MB = (25, 1, 0.25, 0.3, 0.5, 0.75, 1.5, 2.5, 2**-18, 1e-7)


@st.composite
def parameter_lists(draw: st.DrawFn, max_size: int = 24) -> tuple[ParamSpec, ...]:
    """Draw the parameters of a model, in the reducer's order.

    Args:
        draw: given by Hypothesis.
        max_size: the longest list.

    Returns:
        1 to ``max_size`` parameters of 0 to 20 MiB, of up to four (dtype, device) groups, now and then with a
        sparse gradient. Nothing is allocated.
    """
    groups = draw(st.lists(st.sampled_from(_GROUPS), min_size=1, max_size=4))
    gradients = draw(st.lists(_GRADIENTS, min_size=1, max_size=max_size))
    params = tuple(
        _spec(f"layers.{place}.weight", elements, *groups[group % len(groups)], sparse=sparse)
        for place, (elements, group, sparse) in enumerate(gradients)
    )
    event(f"parameters: of {len({(param.dtype, param.device) for param in params})} dtypes and devices")
    for what, holds in (
        ("a sparse gradient", any(param.sparse for param in params)),
        ("no element", any(param.nbytes == 0 for param in params)),
    ):
        if holds:
            event(f"parameters: one with {what}")
    return params


def _spec(name: str, elements: int, dtype: str, device: str, *, sparse: bool) -> ParamSpec:
    itemsize: int = getattr(torch, dtype).itemsize
    return ParamSpec(name, elements * itemsize, dtype, device, sparse)


def ddp_arguments() -> st.SearchStrategy[dict[str, Any]]:
    """Draw those arguments of ``DistributedDataParallel`` that decide its buckets.

    Returns:
        A strategy for keyword arguments that DDP accepts; each may be absent.
    """
    caps = st.sampled_from(_CAPS_MB)
    return st.fixed_dictionaries(
        {},
        optional={
            "bucket_cap_mb": caps,
            "bucket_cap_mb_list": st.lists(caps, max_size=4),
            "find_unused_parameters": st.booleans(),
            "static_graph": st.booleans(),
        },
    )


def bucket_configs() -> st.SearchStrategy[BucketConfig]:
    """Draw bucket limits, as DDP would have them for some arguments.

    Returns:
        A strategy for configurations, some with ``DDP_SET_LAST_BUCKET_CAP``.
    """
    configs = ddp_arguments().map(lambda arguments: BucketConfig.from_kwargs(**arguments))
    return st.builds(_with_last_bucket, configs, st.integers(0, 7))


def _with_last_bucket(config: BucketConfig, die: int) -> BucketConfig:
    for what, holds in (
        ("a list of caps", bool(config.cap_bytes_list)),
        ("unused parameters", config.find_unused_parameters),
        ("a static graph", config.static_graph),
        ("a small last bucket", die == 7),
    ):
        if holds:
            event(f"limits: {what}")
    return replace(config, small_last_bucket=die == 7)


@st.composite
def plans(draw: st.DrawFn, max_size: int = 12) -> Plan:
    """Draw a plan of a model, of up to three graphs.

    Args:
        draw: given by Hypothesis.
        max_size: the largest number of parameters.

    Returns:
        A plan by either policy, now and then with parameters that no graph reads.
    """
    params = draw(parameter_lists(max_size))
    homes = (0, *(draw(st.integers(0, 3)) for _ in params[1:]))
    policy: Policy = draw(st.sampled_from(("plan", "plan", "plan", "ddp")))
    event(f"plan: policy {policy}")
    event(f"plan: {len(set(homes))} homes of parameters")
    return plan_of(params, homes, draw(bucket_configs()), policy)


@st.composite
def graphs(
    draw: st.DrawFn,
    max_steps: int = 12,
    *,
    features: Iterable[str] | None = None,
    without: Iterable[str] = (),
) -> SmallGraph:
    """Draw a small forward graph as Dynamo would leave it: parameters are placeholders, values are fake.

    Among its steps: parameters read by position, by keyword, as receiver, within a list, tied, frozen and
    detached, complex, in bfloat16, of no dimension or no element; convolutions, also strided and channels
    last; norms, also with buffers; embeddings; attention; a checkpoint, a cond and (from torch 2.13 on) a
    custom function, with graphs of their own; in-place ops on values, views, inputs and buffers, also twice;
    tuples whose items are taken much later; views by sizes known as ints; dropout; constants; spans without
    grad (some dead, some empty) and under autocast. Among its outputs: views of others and of the input, and
    sizes. The number of rows may be a symbol. Each step and output is reported as a Hypothesis event.

    A dropout may be dead: run eagerly it moves the generator, compiled it is gone, so compare random values
    only between two eager or two compiled runs.

    Args:
        draw: given by Hypothesis.
        max_steps: the largest number of steps, of one to six nodes each.
        features: the steps and outputs that may occur, as `graph_features` names them; by default all.
        without: those that may not.

    Returns:
        ``(gm, param_placeholders, example_values)``. At least one output requires a gradient;
        :func:`tests.graph_builder.real_inputs` gives tensors to run it on.

    Raises:
        UsageError: if there is no feature of such a name.
    """
    given, refused = chosen_features(graph_features(), features, without, "a graph's features")
    allowed = given - refused
    sketch = Sketch(draw, draw(_builders(symbolic=SYMBOLIC in allowed)))
    weight = sketch.builder.parameter(sketch.layer(), "weight", 4, 4)
    sketch.values.append(sketch.builder.call(torch._C._nn.linear, sketch.builder.x, weight))
    for step in draw(_some(STEPS, allowed, max_steps)):
        event(f"step: {_told(step)}")
        made = step(sketch)
        if made is not None:
            sketch.values.append(made)
    if draw(st.booleans()):
        sketch.values.append(_sum_of_unread(sketch))
    # The first linear's result is always differentiable; what else is returned may not be.
    outputs: list[fx.Node] = []
    for output in draw(_some(OUTPUTS, allowed, 3)):
        event(f"output: {_told(output)}")
        outputs += output(sketch)
    sketch.builder.evaluate()
    return sketch.builder.finish(*outputs, _last_differentiable(sketch.values))


@st.composite
def _builders(draw: st.DrawFn, *, symbolic: bool) -> GraphBuilder:
    """Rows that are a number, or (some) a symbol."""
    if not (symbolic and draw(st.sampled_from((*[False] * 15, True)))):
        return GraphBuilder(batch=draw(st.integers(1, 3)), width=4)
    event(f"input: {SYMBOLIC}")
    return GraphBuilder(batch=draw(st.integers(2, 3)), width=4, symbolic=True)


def graph_features() -> frozenset[str]:
    """Every step and output that a drawn graph can have, and what its input may be."""
    return frozenset((SYMBOLIC, *(_told(each) for each in (*STEPS, *OUTPUTS))))


def _some(makers: Sequence[Maker], allowed: frozenset[str], most: int) -> st.SearchStrategy[list[Maker]]:
    kept = [maker for maker in makers if _told(maker) in allowed]
    return st.lists(st.sampled_from(kept), max_size=most) if kept else st.just([])


def _told(step: Callable[..., Any]) -> str:
    return step.__name__.strip("_").replace("_", " ")


def _sum_of_unread(sketch: Sketch) -> fx.Node:
    """Leave no value dead: most models do not, and a dead reader hides what its parameter asks of a plan."""
    total = sketch.values[-1]
    for value in sketch.values[:-1]:
        if not value.users:
            total = sketch.builder.call(operator.add, total, value)
    return total


def _last_differentiable(values: list[fx.Node]) -> fx.Node:
    return next(value for value in reversed(values) if value.meta["example_value"].requires_grad)
