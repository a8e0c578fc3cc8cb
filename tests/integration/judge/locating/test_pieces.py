"""Which part of a model gets compiled, and that the rest stays as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd, lookup_backend

from ddpopt.graph.nodes import body_nodes
from ddpopt.judge.locating.pieces import NOTHING, ChosenPieces
from tests.support.miscompiled import Stages

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Spy:
    """AOTAutograd, and a note of what it was given."""

    def __init__(self) -> None:
        self.compiled: list[list[str]] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [getattr(node.target, "__name__", str(node.target)) for node in body_nodes(gm.graph)]
        self.compiled.append(names)
        return lookup_backend("aot_eager")(gm, list(example_inputs))


def gradients(model: nn.Module, call: Callable[..., Any]) -> list[Tensor]:
    model.zero_grad()
    call(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("chosen", "compiled"),
    [(NOTHING, []), (range(2, 4), [["linear", "sigmoid"]]), (range(6, 99), [["linear", "relu"]])],
)
def test_what_is_chosen_is_compiled_as_one_and_gradients_stay(chosen: range, compiled: list[Any]) -> None:
    model, spy = Stages(), Spy()
    got = gradients(model, torch.compile(model, backend=ChosenPieces(spy, chosen)))
    expected = gradients(model, model)
    assert spy.compiled == compiled
    assert len(got) == len(expected) == 8
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


ACROSS = ["graph 0, segments 5 to 7 of 8: tanh", "graph 1, segments 0 to 1 of 8: linear"]


@pytest.mark.parametrize(
    ("cuts", "part", "named"),
    [(True, range(5, 10), ACROSS), (False, range(1, 2), ["compiled segment 1 of 2: linear"])],
)
def test_pieces_are_counted_through_all_graphs_and_named(cuts: bool, part: range, named: list[str]) -> None:
    backend = ChosenPieces(Spy(), cuts=cuts)
    for rows in (4, 5):
        torch.compile(Stages(), backend=backend, dynamic=False)(torch.zeros(rows, 8))
    assert backend.count == (16 if cuts else 2)
    for line, begins in zip(backend.described(part), named, strict=True):
        assert line.startswith(begins)
        assert "(miscompiled.py:" in line


def test_a_backward_that_compiled_autograd_captures_is_cut_too_and_gradients_stay() -> None:
    model, x = Stages(), torch.linspace(-1, 1, 32).view(4, 8)

    def captured(backend: ChosenPieces) -> list[Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        loss = torch.compile(model, backend=backend)(x).square().sum()
        with compiled_autograd._enable(torch.compile(backend=backend), dynamic=False):
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    forward = ChosenPieces(Spy(), range(8))
    expected, spy = captured(forward), Spy()
    tanh = next(i for i, names in enumerate(forward.graphs[1]) if "tanh_backward" in names[0])
    got = captured(ChosenPieces(spy, range(8 + tanh + 1)))
    assert len(spy.compiled) == 2
    assert spy.compiled[1][-1] == "tanh_backward.default"
    assert len(got) == 8
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    (named,) = forward.described(range(8 + tanh, 8 + tanh + 1))
    assert named.startswith(f"graph 1, segment {tanh} of ")
    assert ": tanh_backward.default (miscompiled.py:" in named
