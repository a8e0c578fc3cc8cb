"""Parts of graphs as source code: the code is run, and computes what the part computed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpopt.judge.locating.known import Blamed
from ddpopt.judge.locating.pieces import EVERYTHING, ChosenPieces, Part, Piece
from ddpopt.judge.locating.rungs import Question, Stage
from ddpopt.judge.locating.scripting import Author
from ddpopt.judge.locating.segment_code import Code, Recorder
from tests.unit.miscompiled import Stages

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def code_of(model: nn.Module, part: Part, *inputs: Tensor) -> Code:
    recorder = Recorder()
    torch.compile(model, backend=ChosenPieces(recorder, part))(*inputs)
    code = recorder.code()
    assert code is not None
    return code


def module_of(tmp_path: Path, code: Code, *, drawn: bool = False) -> Any:
    """What a script with that code makes, and the arguments that it has for it."""
    blamed, question = Blamed(("it",), code), Question("x", "default", "whole", "aot_eager")
    drafts = Author(question, tmp_path / "shown.py").drafts(Stage("local", "aot_eager"), blamed)
    draft = drafts[0 if drawn else 1]
    torch.save(draft.tensors, tmp_path / "shown.pt")
    scope: dict[str, Any] = {"__file__": str(tmp_path / "shown.py")}
    with torch._inductor.config.patch(fallback_random=False):  # a script sets it for good
        exec(draft.text, scope)
    return scope["built"](scope["Segment"]), list(scope["inputs"]().values())


def test_the_code_of_a_segment_computes_what_the_segment_computed(tmp_path: Path) -> None:
    model, x = Stages(), torch.linspace(-1, 1, 32).view(4, 8)
    code = code_of(model, Part(Piece(0, 2), Piece(0, 3)), x)
    module, arguments = module_of(tmp_path, code)
    expected = torch.sigmoid(model.layers[1](torch.relu(model.layers[0](x))))
    assert torch.equal(module(*arguments)[0], expected)
    assert [argument.requires_grad for argument in arguments] == [True, True, True]
    assert "miscompiled.py:34 in forward, code: x = torch.sigmoid(self.layers[1](x))" in code.text


class Branching(nn.Module):
    """Holds a graph inside of its graph."""

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = checkpoint(lambda y: torch.tanh(y).sin(), x, use_reentrant=False)
        return kept * torch.tensor([1.0, 2.0, 3.0])


def test_a_graph_is_written_with_the_graphs_that_it_holds(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 3, requires_grad=True)
    module, arguments = module_of(tmp_path, code_of(Branching(), EVERYTHING, x))
    assert torch.equal(module(*arguments)[0], Branching()(x))
    compiled: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments)[0], Branching()(x))


def test_parts_of_several_graphs_and_one_that_never_ran_have_no_code() -> None:
    recorder = Recorder()
    assert recorder.code() is None
    for model in (Stages(), nn.Identity()):
        torch.compile(lambda x, model=model: model(x) + 1, backend=recorder)(torch.zeros(4, 8))
    assert recorder.code() is None


def test_drawn_arguments_have_the_form_that_they_had(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "x": torch.ones(3, 2).t().requires_grad_(),
        "n": 7,
        "places": torch.tensor([3, 9]),
    }
    text = (
        "class Segment(torch.nn.Module):\n    def forward(self, x, n, places):\n        return (x[:, :n],)\n"
    )
    _, (x, n, places) = module_of(tmp_path, Code(text, given), drawn=True)
    assert (x.shape, x.stride(), x.requires_grad) == ((2, 3), (1, 2), True)
    assert (n, places.dtype, places.shape) == (7, torch.int64, (2,))
    assert not torch.equal(x, given["x"])


def test_what_torch_cannot_draw_is_not_drawn() -> None:
    assert Code("", {"x": torch.eye(2).to_sparse()}).drawn() == {}
