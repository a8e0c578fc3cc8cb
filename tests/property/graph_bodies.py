"""The steps of drawn forward graphs that have graphs of their own: the bodies of higher-order operators.

A body is added to the graph's module, and the step is a call with it, as Dynamo writes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from tests.graph_builder import GraphBuilder
from tests.property.graph_sketch import Sketch, without_grad


def _layer_of(builder: GraphBuilder, *given: fx.Node) -> tuple[fx.Node]:
    return (builder.call(torch.tanh, builder.call(torch._C._nn.linear, *given)),)


def _product_of(builder: GraphBuilder, value: fx.Node, weight: fx.Node) -> tuple[fx.Node]:
    return (builder.call(operator.matmul, value, weight),)


def checkpoint(sketch: Sketch) -> fx.Node:
    """A layer whose values the backward computes again."""
    builder, given = sketch.builder, (sketch.value(), sketch.weight(), sketch.vector())
    body = builder.subgraph("wrap_body", dict(zip("xwb", given, strict=True)), _layer_of)
    results = builder.call_like(
        lambda _, value, weight, bias: (value @ weight + bias,),
        tag_activation_checkpoint,
        *(body, *given),
        use_reentrant=False,
    )
    return builder.call(operator.getitem, results, 0)


def cond(sketch: Sketch) -> fx.Node:
    """One of two branches, by the sign of a value's sum."""
    builder, given = sketch.builder, (sketch.value(), sketch.weight())
    named = dict(zip("xw", given, strict=True))
    bodies = [builder.subgraph(f"cond_{name}", named, body) for name, body in _BRANCHES.items()]
    positive = builder.call(operator.gt, builder.method("sum", given[0]), 0)
    results = builder.call_like(
        lambda _, _true, _false, operands: (operands[0] @ operands[1],), cond_op, positive, *bodies, given
    )
    return builder.call(operator.getitem, results, 0)


_BRANCHES: Mapping[str, Callable[..., tuple[fx.Node]]] = {"true": _layer_of, "false": _product_of}


def custom_function(sketch: Sketch) -> fx.Node:
    """A matrix product whose gradients a body of its own computes, as torch 2.13's Dynamo writes it."""
    builder, (value, weight) = sketch.builder, (sketch.value(), sketch.weight())

    def forward(inner: GraphBuilder, *given: fx.Node) -> tuple[tuple[fx.Node, ...], ...]:
        with without_grad(inner):
            product = _product_of(inner, *given)
        return product, given

    def backward(inner: GraphBuilder, gradient: fx.Node, *saved: fx.Node) -> tuple[fx.Node, ...]:
        with without_grad(inner):
            turned, weight = (inner.method("t", each) for each in saved)
            factors = ((gradient, weight), (turned, gradient))
            return tuple(inner.call(operator.matmul, *pair) for pair in factors)

    bodies = (
        builder.subgraph("fwd_body", {"x": value, "w": weight}, forward),
        builder.subgraph("bwd_body", {"gradient": value, "x": value, "w": weight}, backward),
    )
    results = builder.call_like(
        lambda _forward, _backward, value, weight: (value @ weight,),
        autograd_function_apply,
        *(*bodies, value, weight),
        non_differentiable_idx=[],
        saved_for_backward_idx=[0, 1],
    )
    return builder.call(operator.getitem, results, 0)
