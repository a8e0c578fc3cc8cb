"""The steps that drawn forward graphs are made of: each adds a few nodes and returns the value they make.

They differ in what a cut or a plan has to mind; what more there is to compute, drawn models have.

Invariant: a step leaves a graph that runs forward and backward. To that end a step mutates only what no other
node has read yet (or what autograd does not save), and hands it on only after the mutation: a value that may
be read is never mutated any more.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import fx

from tests.support.graph_builder import GraphBuilder


class Sketch:
    """A graph under construction, and the values, (batch, width) in float32, that its next node may read."""

    def __init__(self, draw: st.DrawFn, builder: GraphBuilder) -> None:
        self.draw = draw
        self.builder = builder
        self.values = [builder.x]
        self.pending: list[tuple[fx.Node, int]] = []
        self.weights: list[fx.Node] = []
        self._layers = 0

    def layer(self) -> str:
        """The path of the next layer in the model."""
        self._layers += 1
        return f"layers.{self._layers - 1}"

    def value(self) -> fx.Node:
        """One of the values there are, more often one of the latest: else most of the graph would be dead."""
        return self.draw(st.sampled_from((*reversed(self.values), *self.values[-2:])))

    def weight(self) -> fx.Node:
        """A (width, width) parameter: new and trainable as a rule, else tied or frozen."""
        kind = self.draw(st.sampled_from(("new", "new", "tied", "frozen")))
        if kind == "tied" and self.weights:
            return self.draw(st.sampled_from(self.weights))
        width = self.builder.width
        node = self.builder.parameter(self.layer(), "weight", width, width, trainable=kind != "frozen")
        self.weights.append(node)
        return node

    def vector(self, role: str = "bias") -> fx.Node:
        """A new (width,) parameter."""
        return self.builder.parameter(self.layer(), role, self.builder.width)


_ACTIVATIONS: tuple[Callable[..., Any], ...] = (F.relu, F.gelu, torch.tanh)


def _linear(sketch: Sketch) -> fx.Node:
    return sketch.builder.call(torch._C._nn.linear, sketch.value(), sketch.weight(), sketch.vector())


def _parameters_in_a_list(sketch: Sketch) -> fx.Node:
    rows = sketch.builder.width // 2
    halves = [sketch.builder.parameter(sketch.layer(), "half", rows, 2 * rows) for _ in range(2)]
    joined = sketch.builder.call(torch.cat, halves, dim=0)
    return sketch.builder.call(torch._C._nn.linear, sketch.value(), joined)


def _add(sketch: Sketch) -> fx.Node:
    return sketch.builder.call(torch.add, sketch.value(), sketch.value(), alpha=0.5)


def _activation(sketch: Sketch) -> fx.Node:
    activation = sketch.draw(st.sampled_from(_ACTIVATIONS))
    return sketch.builder.call(activation, sketch.value())


def _dropout(sketch: Sketch) -> fx.Node:
    return sketch.builder.call(F.dropout, sketch.value(), p=0.5, training=True)


def _mutated_sum(sketch: Sketch) -> fx.Node:
    total = sketch.builder.call(operator.add, sketch.value(), sketch.value())
    other = sketch.draw(st.sampled_from((_linear, _activation)))(sketch)
    mutated = sketch.builder.method("add_", total, other)
    return sketch.draw(st.sampled_from((total, mutated)))


def _mutated_view(sketch: Sketch) -> fx.Node:
    total = sketch.builder.call(operator.add, sketch.value(), 1.0)
    row = sketch.builder.method("view", total, -1)
    sketch.builder.call(operator.imul, row, 0.5)
    return total


def _reshaped_view(sketch: Sketch) -> fx.Node:
    total = sketch.builder.call(operator.add, sketch.value(), 1.0)
    view = sketch.builder.method("view", total, sketch.builder.width, sketch.builder.rows)
    reshaped = sketch.builder.method("t_", view)
    sketch.draw(st.sampled_from((_linear, _activation)))(sketch)
    return sketch.builder.method("contiguous", sketch.draw(st.sampled_from((view, reshaped))))


def _mutated_input(sketch: Sketch) -> fx.Node:
    extra = sketch.builder.input(f"extra_{len(sketch.values)}", sketch.builder.batch, sketch.builder.width)
    sketch.builder.method("add_", extra, 1.0)
    return extra


def _mutated_buffer(sketch: Sketch) -> fx.Node:
    statistics = sketch.builder.buffer(sketch.layer(), "mean", sketch.builder.width)
    before = sketch.builder.call(operator.add, sketch.value(), statistics)
    mean = sketch.builder.method("mean", sketch.builder.method("detach", sketch.value()), 0)
    sketch.builder.method("lerp_", statistics, mean, 0.1)
    return before


def _chunks(sketch: Sketch) -> fx.Node:
    width = sketch.builder.width
    wide = sketch.builder.parameter(sketch.layer(), "weight", 2 * width, width)
    both = sketch.builder.call(torch._C._nn.linear, sketch.value(), wide)
    chunks = sketch.builder.method("chunk", both, 2, -1)
    sketch.pending.append((chunks, 1))
    return sketch.builder.call(operator.getitem, chunks, 0)


def _later_item(sketch: Sketch) -> fx.Node:
    if not sketch.pending:
        return _chunks(sketch)
    return sketch.builder.call(operator.getitem, *sketch.pending.pop(0))


def _views(sketch: Sketch) -> fx.Node:
    builder = sketch.builder
    value = sketch.value()
    rows = builder.method("size", value, 0)
    split = builder.method("view", value, rows, 2, -1)
    swapped = builder.method("transpose", split, 1, 2)
    return builder.method("reshape", swapped, (rows, builder.width))


def _detached_parameter(sketch: Sketch) -> fx.Node:
    detached = sketch.builder.method("detach", sketch.weight())
    return sketch.builder.call(torch.mm, sketch.value(), detached)


def _constant(sketch: Sketch) -> fx.Node:
    constant = sketch.builder.constant(torch.ones(sketch.builder.width))
    return sketch.builder.call(operator.mul, sketch.value(), constant)


def _no_grad_span(sketch: Sketch) -> fx.Node | None:
    sketch.builder.set_grad_enabled(False)
    inside = sketch.draw(st.sampled_from(_PURE_STEPS))(sketch) if sketch.draw(st.booleans()) else None
    sketch.builder.set_grad_enabled(True)
    return None if sketch.draw(st.booleans()) else inside


def _autocast_span(sketch: Sketch) -> fx.Node:
    handle = sketch.builder.enter_autocast()
    inside = _linear(sketch)
    sketch.builder.exit_autocast(handle)
    return sketch.builder.method("float", inside)


def _low_precision(sketch: Sketch) -> fx.Node:
    width = sketch.builder.width
    weight = sketch.builder.parameter(sketch.layer(), "weight", width, width, dtype=torch.bfloat16)
    low = sketch.builder.method("to", sketch.value(), torch.bfloat16)
    return sketch.builder.method("float", sketch.builder.call(torch._C._nn.linear, low, weight))


Step = Callable[[Sketch], fx.Node | None]
_PURE_STEPS: tuple[Step, ...] = (
    _linear, _parameters_in_a_list, _add, _activation, _dropout, _views, _detached_parameter, _constant,
    _low_precision,
)  # fmt: skip
STEPS: tuple[Step, ...] = (
    *_PURE_STEPS, _chunks, _later_item, _mutated_sum, _mutated_view, _reshaped_view, _mutated_input,
    _mutated_buffer, _no_grad_span, _autocast_span,
)  # fmt: skip


def _value(sketch: Sketch) -> tuple[fx.Node, ...]:
    return (sketch.draw(st.sampled_from(sketch.values)),)


def _value_and_view(sketch: Sketch) -> tuple[fx.Node, ...]:
    (value,) = _value(sketch)
    return value, sketch.builder.method("unsqueeze", value, 0)


def _view_of_input(sketch: Sketch) -> tuple[fx.Node, ...]:
    return (sketch.builder.method("unsqueeze", sketch.builder.x, 0),)


def _size(sketch: Sketch) -> tuple[fx.Node, ...]:
    return (sketch.builder.method("size", sketch.value(), 0),)


Output = Callable[[Sketch], tuple[fx.Node, ...]]
OUTPUTS: tuple[Output, ...] = (_value, _value, _value_and_view, _view_of_input, _size)
