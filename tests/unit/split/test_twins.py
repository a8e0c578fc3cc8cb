"""Segments are twins exactly when one compilation may serve both."""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddpopt.split.twins import signature
from tests.support.graph_builder import GraphBuilder, SmallGraph
from tests.support.tracing import trace


def of(graph: SmallGraph) -> object:
    return signature(graph.gm, graph.example_values)


def layer(
    *,
    alpha: float = 1.0,
    width: int = 4,
    batch: int = 2,
    trainable: bool = True,
    activation: Any = torch.tanh,
) -> SmallGraph:
    """A linear layer, an activation, and a sum with a literal."""
    builder = GraphBuilder(batch=batch, width=width)
    weight = builder.parameter("layer", "weight", width, width, trainable=trainable)
    bias = builder.parameter("layer", "bias", width)
    linear = builder.call(F.linear, builder.x, weight, bias=bias)
    return builder.finish(builder.call(torch.add, builder.call(activation, linear), alpha))


class Same(nn.Module):
    """Adds two inputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


SUM = fx.symbolic_trace(Same())


def plain() -> Tensor:
    return torch.ones(4, 4)


def sums(*inputs: object) -> object:
    return signature(SUM, [*inputs, plain()][:2])


def with_policy(key: str, value: int) -> object:
    graph = layer()
    graph.gm.graph.output_node().prev.meta[key] = value
    return of(graph)


def calling(*arguments: Any, body: nn.Module | None = None) -> object:
    """Of a segment that calls a method with literals, or hands it a body, as checkpointing does."""
    builder = GraphBuilder(batch=2, width=4)
    call = builder.method("sin", builder.x)
    graph = builder.finish(call)
    call.args = (*call.args, *arguments)
    if body is not None:
        graph.gm.add_module("body", body)
        with graph.gm.graph.inserting_before(call):
            call.args = (*call.args, graph.gm.graph.get_attr("body"))
    return of(graph)


def times(factor: float, policy: object = None) -> fx.GraphModule:
    body = fx.symbolic_trace(lambda x: x * factor)
    body.meta["_checkpoint_context_fn"] = policy
    return body


def holding(value: Tensor) -> object:
    builder = GraphBuilder(batch=2, width=4)
    return of(builder.finish(builder.call(torch.add, builder.x, builder.constant(value))))


def save_all(*_: object) -> None: ...


def save_none(*_: object) -> None: ...


ONES, LINEAR, ROWS = torch.ones(4), nn.Linear(4, 4), torch.ones(8, 4)
LITERALS = (
    [0, 1], (0, 1), slice(0, 2), slice(0, 3), {"a": 1}, {"b": 1}, {"a": 2}, torch.float32, torch.float64,
    "a", b"a",
)  # fmt: skip
POLICIES = (
    save_all, save_none, None, partial(save_all, 1), partial(save_all, 2), partial(save_none, 1)
)  # fmt: skip
KEYS = ("recompute", "ac_graph_id", "custom", "has_backward_hook", "partitioner_tag")
DISTINCT: dict[str, list[Callable[[], object]]] = {
    "what they compute": [
        lambda: of(layer()), lambda: of(layer(width=8)), lambda: of(layer(batch=3)),
        lambda: of(layer(activation=torch.relu)), lambda: of(layer(trainable=False)),
        *(partial(lambda alpha: of(layer(alpha=alpha)), alpha) for alpha in (2.0, 1, True, 0.0, -0.0)),
    ],
    "literals": [partial(calling, literal) for literal in LITERALS],
    "numbers that are inputs": [partial(sums, number) for number in (1, 1.0, True, 2)],
    "the layout of an input": [
        lambda: sums(plain()),
        lambda: sums(nn.Parameter(plain(), requires_grad=False)),
        lambda: sums(plain().double()),
        lambda: sums(torch.ones(2, 8)),
        lambda: sums(torch.ones(4, 4).t().contiguous().t()),
        lambda: sums(torch.ones(5, 4)[1:]),
        lambda: sums(plain().requires_grad_()),
        lambda: sums(plain().requires_grad_() * 1),
        lambda: sums(plain().to(torch.complex64)),
        lambda: sums(plain().to(torch.complex64).conj()),
        lambda: sums(torch.ones(4, 4, device="meta")),
    ],
    "which inputs share memory": [
        lambda: sums(ROWS[4:], ROWS[4:]), lambda: sums(ROWS[4:], torch.ones(8, 4)[4:]),
        lambda: sums(ROWS[:4], ROWS[4:]), lambda: sums(ROWS[:4], torch.ones(8, 4)[4:]),
    ],
    "tensors that they hold": [partial(holding, ONES), partial(holding, torch.ones(4))],
    "bodies": [lambda: calling(body=times(2)), lambda: calling(body=times(3))],
    "modules": [partial(calling, body=LINEAR), partial(calling, body=nn.Linear(4, 4))],
    "what is saved of a body": [lambda p=policy: calling(body=times(2, p)) for policy in POLICIES],  # type: ignore[misc]
    **{key: [partial(with_policy, key, value) for value in (1, 2)] for key in KEYS},
}  # fmt: skip


@pytest.mark.parametrize("what", DISTINCT)
def test_segments_that_differ_are_no_twins_and_those_that_do_not_are(what: str) -> None:
    for one, other in combinations(DISTINCT[what], 2):
        assert one() != other()
    for make in DISTINCT[what]:
        assert make() == make() is not None


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
    inputs = [each.gm.graph.find_nodes(op="placeholder") for each in graphs]
    values = [[node.meta["example_value"] for node in nodes] for nodes in inputs]
    first, other = map(signature, (each.gm for each in graphs), values)
    assert first != other
    assert first is not None
