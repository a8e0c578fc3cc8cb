"""A drawn forward graph under construction: what its next step may read.

Invariant: a value that may be read is never mutated any more, so that autograd may save it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hypothesis import strategies as st
from torch import fx

from tests.graph_builder import GraphBuilder


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


@contextlib.contextmanager
def without_grad(builder: GraphBuilder) -> Iterator[None]:
    """Let what is added meanwhile run without gradients."""
    builder.set_grad_enabled(False)
    yield
    builder.set_grad_enabled(True)
