"""Which gradients cross a cut in another layout than in eager, proved by running the graph on fake tensors.

A compiled segment takes the gradient of a value that it hands out in the layout of that value; where sizes
are symbols, in the value's memory format instead (a transposed value counts as contiguous). Where eager lays
the gradient out otherwise, its numbers are the same, but what is summed over its rows beyond the cut (the
gradient of a bias) may be summed in another order.

Invariant: nothing real is run; a value that is not named here has its gradient in eager's layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ddpopt.graph.effects import mutated_inputs
from ddpopt.graph.nodes import body_nodes, example_value
from ddpopt.planning.plan import Plan


def relaid_values(
    gm: fx.GraphModule, plan: Plan | None, graph: int = 0, *, symbolic: bool = False
) -> tuple[str, ...] | None:
    """Names of the values whose gradient crosses a cut in another layout than in eager.

    Args:
        gm: the graph that the plan was made for, traced on fake tensors.
        plan: where it is cut; None if that is not known: then each value that is read crosses a cut.
        graph: which of the plan's graphs `gm` is.
        symbolic: whether it may be compiled for symbolic sizes too; `gm` itself has numbers.

    Returns:
        Node names, in graph order; None if the graph cannot be run on fake tensors.
    """
    crossing = (
        [node for node in body_nodes(gm.graph) if node.users] if plan is None else _cut(gm, plan, graph)
    )
    if not crossing:
        return ()
    inputs = [example_value(node) for node in gm.graph.find_nodes(op="placeholder")]
    run = _Run(gm, crossing, symbolic)
    try:
        with _fakes_of(inputs), torch.enable_grad():
            outputs = [leaf for leaf in pytree.tree_leaves(run.run(*inputs)) if _is_trained(leaf)]
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except Exception:  # whatever an operation raises that knows no fake tensors
        return None
    return tuple(node.name for node in crossing if run.is_relaid.get(node.name, False))


def _cut(gm: fx.GraphModule, plan: Plan, graph: int) -> list[fx.Node]:
    """The nodes that a later segment reads."""
    home = {name: s.index for s in plan.segments if s.graph == graph for name in s.nodes}
    return [
        node
        for node in gm.graph.nodes
        if node.name in home and any(home.get(user.name, -1) > home[node.name] for user in node.users)
    ]


class _Run(fx.Interpreter):
    """Runs a graph and compares the layout of each gradient with that of its value."""

    def __init__(self, gm: fx.GraphModule, crossing: list[fx.Node], symbolic: bool) -> None:
        super().__init__(gm)
        self.symbolic = symbolic
        self.crossing = dict.fromkeys(crossing)
        self.is_relaid: dict[str, bool] = {}

    def run_node(self, n: fx.Node) -> object:
        """Run one node, and ask for the gradient of what crosses a cut; of what was changed, once more."""
        value: object = super().run_node(n)
        for made, own in ((n, value), *((source, self.env[source]) for source in mutated_inputs(n))):
            if made in self.crossing and _is_trained(own):
                hookable: Any = own  # torch types its hooks not
                hookable.register_hook(self._comparing(made.name, own))
        return value

    def _comparing(self, name: str, value: Tensor) -> Callable[[Tensor], None]:
        layout, memory_format = _layout(value), suggest_memory_format(value)

        def compare(gradient: Tensor) -> None:
            kept = _layout(gradient) == layout
            if self.symbolic:
                kept = kept and gradient.is_contiguous(memory_format=memory_format)
            self.is_relaid[name] = self.is_relaid.get(name, False) or not kept

        return compare


def _layout(tensor: Tensor) -> tuple[int, ...]:
    """Strides; that of a dimension that has a single element means nothing."""
    return tuple(s if size > 1 else 0 for size, s in zip(tensor.shape, tensor.stride(), strict=True))


def _is_trained(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.requires_grad


@contextlib.contextmanager
def _fakes_of(inputs: Sequence[object]) -> Iterator[None]:
    """Be in the mode that makes tensors fake, as the inputs are; constants of the graph may be real."""
    modes = {id(value.fake_mode): value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    with contextlib.ExitStack() as stack:
        for mode in modes.values():
            stack.enter_context(patch.object(mode, "allow_non_fake_inputs", True))
            stack.enter_context(mode)
        yield
