"""Which part of a model gets compiled, and that the rest stays as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import compiled_autograd, lookup_backend

from ddpopt.graph.nodes import body_nodes
from ddpopt.judge.locating.pieces import WHOLE, ChosenPieces, Piece
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


@pytest.mark.parametrize(
    ("chosen", "compiled"),
    [
        ([], []),
        ([5], [["tanh"]]),
        ([2, 3], [["linear", "sigmoid"]]),
        ([0, 3, 4], [["linear"], ["sigmoid", "linear"]]),
    ],
)
def test_what_is_chosen_is_compiled_neighbours_as_one_and_gradients_stay(
    chosen: list[int], compiled: list[list[str]]
) -> None:
    model, spy = Stages(), Spy()
    backend = ChosenPieces(spy, [Piece(0, place) for place in chosen])
    got, expected = gradients(model, torch.compile(model, backend=backend)), gradients(model, model)
    assert spy.compiled == compiled
    assert len(got) == len(expected) == 8
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))


def test_everything_chosen_is_the_graph_that_dynamo_made() -> None:
    model, all_of_it, each = Stages(), Spy(), Spy()
    first = ChosenPieces(all_of_it)
    gradients(model, torch.compile(model, backend=first))
    torch._dynamo.reset()
    gradients(model, torch.compile(model, backend=ChosenPieces(each, first.pieces(0))))
    assert all_of_it.compiled == each.compiled == [["linear", "relu", "linear", "sigmoid", "linear", "tanh",
                                                    "linear", "relu"]]  # fmt: skip


def test_pieces_are_named_by_graph_place_operation_and_line() -> None:
    model = Stages()
    backend = ChosenPieces(Spy())
    torch.compile(model, backend=backend)(torch.zeros(4, 8))
    assert [
        part.partition(" (")[0] for part in backend.described([Piece(0, 2), Piece(0, 3), Piece(0, 5)])
    ] == [
        "graph 0, segments 2 to 3 of 8: linear",
        "graph 0, segment 5 of 8: tanh",
    ]
    assert "(miscompiled.py:" in backend.described([Piece(0, 5)])[0]


def test_graphs_that_a_mode_has_cut_stay_in_one_piece() -> None:
    backend = ChosenPieces(Spy(), cuts=False)
    torch.compile(Stages(), backend=backend)(torch.zeros(4, 8))
    assert backend.pieces(0) == [Piece(0, 0)]
    assert backend.described(backend.pieces(0))[0].startswith("compiled segment 0 of 1: linear")


def test_a_whole_graph_can_be_chosen_without_knowing_its_pieces() -> None:
    spy = Spy()
    backend = ChosenPieces(spy, [Piece(0, WHOLE)])
    torch.compile(Stages(), backend=backend)(torch.zeros(4, 8))
    assert [len(names) for names in spy.compiled] == [8]
    assert backend.described(backend.wholes) == backend.described(backend.pieces(0))


def test_a_backward_that_compiled_autograd_captures_is_cut_too_and_gradients_stay() -> None:
    model, x = Stages(), torch.linspace(-1, 1, 32).view(4, 8)

    def captured(backend: ChosenPieces) -> list[Tensor]:
        torch._dynamo.reset()
        model.zero_grad()
        loss = torch.compile(model, backend=backend)(x).square().sum()
        with compiled_autograd._enable(torch.compile(backend=backend), dynamic=False):
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    whole = ChosenPieces(Spy(), [Piece(0, WHOLE)])
    expected, spy = captured(whole), Spy()
    tanh = next(i for i, names in enumerate(whole.graphs[1].pieces) if "tanh_backward" in names[0])
    got = captured(ChosenPieces(spy, [Piece(0, WHOLE), Piece(1, 0), Piece(1, tanh)]))
    assert [names[0] for names in spy.compiled[1:]] == ["getitem", "tanh_backward.default"]
    assert len(got) == 8
    assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    (named,) = whole.described([Piece(1, tanh)])
    assert named.startswith(f"captured backward 1, segment {tanh} of ")
    assert named.endswith(": tanh_backward.default (miscompiled.py:35)")
