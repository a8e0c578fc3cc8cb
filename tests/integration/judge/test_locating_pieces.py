"""Which part of a model gets compiled, and that the rest stays as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd, lookup_backend

from ddpopt.graph.nodes import body_nodes
from ddpopt.judge.locating.pieces import NOTHING, ChosenPieces, Part, Piece, whole
from tests.unit.miscompiled import Stages

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


def part(first: int, last: int, graph: int = 0) -> Part:
    return Part(Piece(graph, first), Piece(graph, last))


@pytest.mark.parametrize(
    ("chosen", "compiled"),
    [
        (NOTHING, []),
        (part(0, 0), [["linear"]]),
        (part(5, 5), [["tanh"]]),
        (part(2, 3), [["linear", "sigmoid"]]),
        (part(6, 7), [["linear", "relu"]]),
    ],
)
def test_what_is_chosen_is_compiled_as_one_and_gradients_stay(
    chosen: Part, compiled: list[list[str]]
) -> None:
    model, spy = Stages(), Spy()
    got = gradients(model, torch.compile(model, backend=ChosenPieces(spy, chosen)))
    expected = gradients(model, model)
    assert spy.compiled == compiled
    assert len(got) == len(expected) == 8
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


@pytest.mark.parametrize("chosen", [part(0, 7), whole(0, 0), whole(0, 3)])
def test_all_pieces_are_the_graph_that_dynamo_made(chosen: Part) -> None:
    spy = Spy()
    backend = ChosenPieces(spy, chosen)
    torch.compile(Stages(), backend=backend)(torch.zeros(4, 8))
    assert [len(names) for names in spy.compiled] == [8]
    assert backend.pieces(chosen) == [Piece(0, place) for place in range(8)]


def test_pieces_are_named_by_graph_place_operation_and_line() -> None:
    backend = ChosenPieces(Spy())
    torch.compile(Stages(), backend=backend)(torch.zeros(4, 8))
    (linear, tanh) = (*backend.described(part(2, 3)), *backend.described(part(5, 5)))
    assert linear.startswith("graph 0, segments 2 to 3 of 8: linear (miscompiled.py:")
    assert tanh.startswith("graph 0, segment 5 of 8: tanh (miscompiled.py:")


def test_a_part_may_reach_over_several_graphs() -> None:
    reach = Part(Piece(1, 2), Piece(3, 0))
    assert [list(reach.places(graph, 4)) for graph in range(5)] == [[], [2, 3], [0, 1, 2, 3], [0], []]


def test_graphs_that_a_mode_has_cut_stay_in_one_piece() -> None:
    backend = ChosenPieces(Spy(), cuts=False)
    torch.compile(Stages(), backend=backend)(torch.zeros(4, 8))
    assert backend.pieces(whole(0, 0)) == [Piece(0, 0)]
    assert backend.described(whole(0, 0))[0].startswith("compiled segment 0 of 1: linear")


def test_a_backward_that_compiled_autograd_captures_is_cut_too_and_gradients_stay() -> None:
    model, x = Stages(), torch.linspace(-1, 1, 32).view(4, 8)

    def captured(backend: ChosenPieces) -> list[Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        loss = torch.compile(model, backend=backend)(x).square().sum()
        with compiled_autograd._enable(torch.compile(backend=backend), dynamic=False):
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    forward = ChosenPieces(Spy(), whole(0, 0))
    expected, spy = captured(forward), Spy()
    tanh = next(i for i, names in enumerate(forward.graphs[1].pieces) if "tanh_backward" in names[0])
    got = captured(ChosenPieces(spy, Part(Piece(0, 0), Piece(1, tanh))))
    assert len(spy.compiled) == 2
    assert spy.compiled[1][-1] == "tanh_backward.default"
    assert len(got) == 8
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    (named,) = forward.described(part(tanh, tanh, graph=1))
    assert named.startswith(f"captured backward 1, segment {tanh} of ")
    assert named.endswith(": tanh_backward.default (miscompiled.py:35)")
