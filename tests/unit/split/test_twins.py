"""Segments are twins exactly when one compilation may serve both."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpopt.split.twins import signature
from tests.graph_builder import GraphBuilder, SmallGraph
from tests.unit.tracing import trace

Change = Callable[[fx.GraphModule], None]


def layer(
    name: str = "layer",
    *,
    alpha: float | int | bool = 1.0,
    width: int = 4,
    batch: int = 2,
    activation: Any = torch.tanh,
    trainable: bool = True,
) -> SmallGraph:
    """A linear layer, an activation, and a sum with a literal."""
    builder = GraphBuilder(batch=batch, width=width)
    weight = builder.parameter(name, "weight", width, width, trainable=trainable)
    bias = builder.parameter(name, "bias", width)
    linear = builder.call(F.linear, builder.x, weight, bias=bias)
    return builder.finish(builder.call(torch.add, builder.call(activation, linear), alpha))


def of(graph: SmallGraph) -> object:
    return signature(graph.gm, graph.example_values)


def test_two_layers_of_one_kind_are_twins_wherever_they_stand() -> None:
    first, second = layer("layers.0"), layer("layers.1")
    for node in second.gm.graph.nodes:
        node.meta["stack_trace"] = "elsewhere"
    assert len({of(first), of(second)}) == 1


def test_segments_that_compute_differently_are_no_twins() -> None:
    changes: list[dict[str, Any]] = [{"alpha": alpha} for alpha in (1.0, 2.0, 1, True, 0.0, -0.0)]
    changes += [{"width": 8}, {"batch": 3}, {"activation": torch.relu}, {"trainable": False}]
    assert len({of(layer(**change)) for change in changes}) == len(changes)


# ---------------------------------------------------------------------------------------------- inputs


class Same(nn.Module):
    """Adds two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


SUM = fx.symbolic_trace(Same())


def sums(*inputs: object) -> object:
    return signature(SUM, inputs)


def plain() -> Tensor:
    return torch.ones(4, 4)


INPUTS: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(plain(), requires_grad=False),
    "dtype": lambda: plain().double(),
    "shape": lambda: torch.ones(2, 8),
    "strides": lambda: torch.ones(4, 4).t().contiguous().t(),
    "offset": lambda: torch.ones(5, 4)[1:],
    "gradient": lambda: plain().requires_grad_(),
    "non-leaf": lambda: plain().requires_grad_() * 1,
    "conjugate": lambda: plain().to(torch.complex64).conj(),
    "device": lambda: torch.ones(4, 4, device="meta"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_another_layout_make_no_twins(kind: str) -> None:
    reference = plain().to(torch.complex64) if kind == "conjugate" else plain()
    reference = plain().requires_grad_() if kind == "non-leaf" else reference
    assert sums(INPUTS[kind](), plain()) != sums(reference, plain())
    assert sums(INPUTS[kind](), plain()) == sums(INPUTS[kind](), plain())


def test_inputs_that_alias_alike_are_twins_and_strangers_are_none_of_views_of_one_storage() -> None:
    first, second = torch.ones(4, 4), torch.ones(4, 4)
    assert sums(first, first) == sums(second, second)
    shared = torch.ones(8, 4)
    upper, lower = shared[:4], shared[4:]
    stranger = torch.ones(8, 4)[4:]
    assert sums(upper, lower) != sums(upper, stranger)
    assert sums(upper, upper) != sums(upper, stranger)


def test_numbers_enter_with_value_and_type() -> None:
    assert sums(plain(), 1) == sums(plain(), 1)
    assert len({sums(plain(), number) for number in (1, 1.0, True, 2)}) == 4


class Mine(Tensor):
    """A tensor of the user's own kind."""


def test_what_cannot_be_compared_is_nobodys_twin_and_fake_tensors_can() -> None:
    others = (plain().to_sparse(), object(), plain().as_subclass(Mine))
    assert [sums(plain(), other) for other in others] == [None] * 3
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(plain()) for _ in range(2)]
    assert sums(*fakes) == sums(*(mode.from_tensor(plain()) for _ in range(2))) is not None


def test_symbols_enter_by_their_expression() -> None:
    rows = torch.ones(3, 4)
    graphs = [trace(Same(), rows, other, dynamic=True) for other in (rows, torch.ones(1, 4))]
    first, other = (
        signature(g.gm, [n.meta["example_value"] for n in g.gm.graph.find_nodes(op="placeholder")])
        for g in graphs
    )
    assert first != other
    assert first is not None


# ------------------------------------------------------------------------------------ what a graph holds


def with_constant(value: Tensor) -> SmallGraph:
    builder = GraphBuilder(batch=2, width=4)
    return builder.finish(builder.call(torch.add, builder.x, builder.constant(value)))


def test_segments_that_hold_different_tensors_are_no_twins() -> None:
    shared = torch.ones(4)
    assert of(with_constant(torch.ones(4))) != of(with_constant(torch.ones(4)))
    assert of(with_constant(shared)) == of(with_constant(shared))


def calling(body: nn.Module) -> SmallGraph:
    """A segment that hands a body to an operator, as checkpointing does."""
    builder = GraphBuilder(batch=2, width=4)
    graph = builder.finish(builder.method("sin", builder.x))
    graph.gm.add_module("body", body)
    node = next(n for n in graph.gm.graph.nodes if n.op == "call_method")
    with graph.gm.graph.inserting_before(node):
        held = graph.gm.graph.get_attr("body")
    node.args = (node.args[0], held)
    return graph


def times(factor: float) -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x * factor)


def test_bodies_of_operators_are_compared_by_their_program() -> None:
    assert of(calling(times(2))) == of(calling(times(2))) != of(calling(times(3)))


def test_modules_that_are_no_graphs_enter_by_identity() -> None:
    module = nn.Linear(4, 4)
    assert of(calling(module)) == of(calling(module))
    assert of(calling(module)) != of(calling(nn.Linear(4, 4)))


def checkpointed(policy: Callable[[], object] | None) -> object:
    body = fx.symbolic_trace(lambda x: torch.sin(x))
    body.meta["_checkpoint_context_fn"] = policy
    return of(calling(body))


def test_bodies_under_other_checkpoint_policies_are_no_twins() -> None:
    def save_all(*_: object) -> None: ...

    def save_none(*_: object) -> None: ...

    assert checkpointed(save_all) == checkpointed(save_all)
    assert checkpointed(partial(save_all, 1)) == checkpointed(partial(save_all, 1))
    others = [save_none, None, partial(save_all, 1), partial(save_all, 2), partial(save_none, 1)]
    assert len({checkpointed(policy) for policy in (save_all, *others)}) == 6


@pytest.mark.parametrize(
    "key", ["recompute", "ac_graph_id", "custom", "has_backward_hook", "partitioner_tag"]
)
def test_policies_of_nodes_tell_segments_apart(key: str) -> None:
    first, second, third = layer(), layer(), layer()
    for graph, value in ((first, 1), (second, 2), (third, 1)):
        next(iter(reversed(graph.gm.graph.nodes))).prev.meta[key] = value
    assert of(first) != of(second)
    assert of(first) == of(third)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([0, 1], (0, 1)),
        (slice(0, 2), slice(0, 3)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        (torch.float32, torch.float64),
        ("a", b"a"),
    ],
    ids=repr,
)
def test_literals_tell_segments_apart(left: object, right: object) -> None:
    def calling_with(literal: Any) -> object:
        builder = GraphBuilder(batch=2, width=4)
        graph = builder.finish(builder.method("sin", builder.x))
        next(n for n in graph.gm.graph.nodes if n.op == "call_method").kwargs = {"literal": literal}
        return of(graph)

    assert calling_with(left) != calling_with(right)
    assert calling_with(left) == calling_with(left)
