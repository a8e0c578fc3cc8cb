"""Drawn models as values: what they print, and what they refuse."""

import re
from pathlib import Path

import pytest
import torch

from ddpopt.judge.training.options import OPTIONS
from ddpopt.testing.drawn import DrawnModel, known_features, step
from ddpopt.testing.drawn.forms import CHOICES
from tests.support.refusals import refusal

DOCS = Path(__file__).parents[2] / "docs" / "generators.md"


def test_a_case_lists_its_features_and_the_arguments_for_ddp() -> None:
    conv = step("conv", memory="channels_last")
    case = DrawnModel(steps=(step("linear"), step("unused"), step("dropout"), conv)).case()
    assert case.about == "A model with channels-last, conv, dropout, matmul, unused-parameter."
    assert case.ddp_kwargs == {"bucket_cap_mb": 256 / 2**20, "find_unused_parameters": True}


def test_a_model_is_trained_under_an_option_of_verification() -> None:
    assert set(CHOICES["training"]) <= {option.name for option in OPTIONS}


def test_an_input_may_have_a_gradient_with_a_hook_and_a_loss_may_give_one_again() -> None:
    drawn = DrawnModel((step("linear"), step("added")), leaves="hooked", loss="given", batches=(2, 3))
    assert drawn.features == {"matmul", "large-parameter", "input-hook", "given-gradient", "dynamic-batch"}
    model = drawn.program.model()
    (x,), _ = drawn.program.inputs(0, 1)
    drawn.program.loss(model(x)).backward()  # type: ignore[no-untyped-call]  # of torch
    added = model.get_parameter("rows2").grad
    assert added is not None
    assert x.grad is not None
    assert torch.equal(added, torch.full((3, 8), 0.25))
    assert torch.allclose(x.grad, torch.full((3, 8), 0.125) @ model.get_parameter("linear1.weight"))


def test_a_view_that_is_written_to_is_returned_where_the_models_own_forward_knows_it() -> None:
    returned = step("written", read="returned")
    assert ", v1" in DrawnModel((returned,)).source
    assert ", v2" not in DrawnModel((step("submodule", body=(returned,)),)).source


def test_a_sparse_gradient_is_asked_for_only_where_it_is_sure_to_come() -> None:
    sparse = step("embedding", gradient="sparse")
    unreached = (
        DrawnModel(steps=(sparse, step("gain", 1)), joined=False),
        DrawnModel(steps=(step("no_grad", layers="trainable", body=(sparse,)),)),
    )
    for drawn in unreached:
        assert "sparse=True" not in drawn.source
        assert "sparse-embedding" not in drawn.features
    assert "sparse=True" in DrawnModel(steps=(sparse,)).source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step('konv')", "expected the name of a block, got 'konv'. The blocks are: "),
        ("step('linear', 0, 1)", "block 'linear': expected at most 1 inputs, each >= 0, got (0, 1)"),
        ("step('conv1d', size=3)", "block 'conv1d': expected size to be one of no options, got 3"),
        ("step('gain', body=[step('empty')])", "block 'gain': expected no body, got [step('empty')]"),
        (
            "step('checkpointed', body=[step('residual', body=[step('batch_norm')])])",
            "block 'checkpointed': expected steps that may run twice in its body, got step('batch_norm')",
        ),
        (
            "step('repeat', body=[step('residual', body=[step('graph_break')])])",
            "block 'repeat': expected steps without a graph break in its body, got step('graph_break')",
        ),
        ("step('residual', body=[step('other')])", "block 'residual': expected steps in its body, not out"),
        ("DrawnModel((step('other'),))", "expected steps to be steps whose blocks are steps, got (step("),
        ("DrawnModel(outputs=[step('other')])", "expected outputs to be of type tuple, got [step('other')]"),
        ("DrawnModel(width=6)", "expected a width that is a multiple of 4 and a cap of at least one byte"),
        ("DrawnModel(batches=(2, 1))", "expected batches to be numbers of at least 2, got (2, 1)"),
        ("DrawnModel(training='x')", "expected training to be one of default, accumulation, two_forwards"),
    ],
)
def test_an_invalid_model_is_rejected(text: str, message: str) -> None:
    assert refusal(lambda: eval(text, {"DrawnModel": DrawnModel, "step": step})).startswith(message)


def test_the_documentation_lists_every_feature() -> None:
    rows = DOCS.read_text().partition("## Features")[2]
    listed = re.findall(r"`([a-z-]+)`", rows.partition("|---|---|")[2].rpartition("|\n")[0])
    assert sorted(listed) == sorted(known_features())
