"""Parts of graphs as source code: the code is run, and computes what the part computed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpopt.judge.locating.pieces import Piece
from ddpopt.judge.locating.segment_code import Code, Given, NotWritable, Recorder
from tests.unit.miscompiled import Stages

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Shifted(nn.Module):
    """Reads a tensor that is none of its parameters or buffers."""

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.tensor([1.0, 2.0, 3.0])
        return torch.relu(x + shift) * 2


class Branching(nn.Module):
    """Holds graphs inside of its graph."""

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = checkpoint(lambda y: torch.tanh(y).sin(), x, use_reentrant=False)
        return kept * 2


def code_of(model: nn.Module, pieces: list[Piece], *inputs: Tensor) -> Code:
    recorder = Recorder(pieces, cuts=True)
    torch.compile(model, backend=recorder)(*inputs)
    return recorder.code()


def module_of(code: Code) -> Any:
    scope: dict[str, Any] = {"torch": torch, "SAVED": code.tensors}
    for line in [*code.imports, *code.classes]:
        exec(line, scope)
    return scope["Segment"]()


def run(code: Code) -> Any:
    return module_of(code)(*(given.value for given in code.given))


def test_the_code_of_a_segment_computes_what_the_segment_computed() -> None:
    model, x = Stages(), torch.linspace(-1, 1, 32).view(4, 8)
    code = code_of(model, [Piece(0, 2), Piece(0, 3)], x)
    (got,) = run(code)
    expected = torch.sigmoid(model.layers[1](torch.relu(model.layers[0](x))))
    assert torch.equal(got, expected)
    assert [given.requires_grad for given in code.given] == [True, True, True]
    assert code.chosen == []
    assert code.lines
    assert all(line.startswith("miscompiled.py:") for line in code.lines)


def test_segments_that_are_apart_stand_in_classes_of_their_own_with_the_gap_between_them() -> None:
    model, x = Stages(), torch.linspace(-1, 1, 32).view(4, 8)
    code = code_of(model, [Piece(0, 3), Piece(0, 5)], x)
    (got,) = run(code)
    hidden = torch.relu(model.layers[0](x))
    expected = torch.tanh(model.layers[2](torch.sigmoid(model.layers[1](hidden))))
    assert torch.equal(got, expected)
    assert len(code.classes) == 4
    assert code.chosen == ["segment_0", "segment_2"]


@pytest.mark.parametrize(
    ("model", "x", "places"),
    [
        pytest.param(Stages(), torch.linspace(-1, 1, 32).view(4, 8), 8, id="a whole graph"),
        pytest.param(Shifted(), torch.linspace(-1, 1, 3), 4, id="a graph that holds a tensor"),
    ],
)
def test_a_whole_graph_can_be_written_with_the_tensors_that_it_holds(
    model: nn.Module, x: Tensor, places: int
) -> None:
    (got,) = run(code_of(model, [Piece(0, place) for place in range(places)], x))
    assert torch.equal(got, model(x))


def test_bodies_of_higher_order_operators_become_classes() -> None:
    x = torch.linspace(-1, 1, 3, requires_grad=True)
    code = code_of(Branching(), [Piece(0, place) for place in range(3)], x)
    assert len(code.classes) == 2
    assert torch.equal(run(code)[0], Branching()(x))
    compiled: Any = torch.compile(module_of(code), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x)[0], Branching()(x))


def test_pieces_of_several_graphs_are_refused() -> None:
    with pytest.raises(NotWritable, match="its pieces are in several graphs"):
        Recorder([Piece(0, 0), Piece(1, 0)], cuts=True).code()


def test_a_part_that_was_never_met_is_refused() -> None:
    with pytest.raises(NotWritable, match="could not be cut out"):
        code_of(Stages(), [Piece(7, 0)], torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.full((2, 3), 0.5), "torch.randn((2, 3), dtype=torch.float32, device='cpu').mul_(0.5)"),
        (torch.tensor([3, 9]), "torch.randint(3, 10, (2,), dtype=torch.int64, device='cpu')"),
        (torch.zeros(2), "torch.randn((2,), dtype=torch.float32, device='cpu').mul_(0.0)"),
        (7, "7"),
        (torch.eye(2).to_sparse(), None),
    ],
)
def test_arguments_are_drawn_as_large_as_they_were(value: Any, expected: str | None) -> None:
    assert Given("x", value).code() == expected


def test_drawn_arguments_keep_their_layout_and_whether_they_are_trained() -> None:
    drawn = Given("x", torch.ones(3, 2).t(), requires_grad=True).code()
    assert drawn is not None
    assert drawn.startswith("strided(torch.randn((2, 3)")
    assert drawn.endswith(", (1, 2)).requires_grad_()")
