"""What our strategies draw of models: they run, repeat, print, shrink, and have every feature."""

import statistics
import sys
from collections import Counter
from functools import partial
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.statistics import collector
from torch import Tensor, nn

from ddpopt.errors import UsageError
from ddpopt.testing import strategies
from ddpopt.testing.drawn import BLOCKS, DrawnModel, known_features, step
from ddpopt.testing.strategies import models
from tests.support.profiles import share

Results = dict[str, Tensor | None]


def results(model: nn.Module, loss: Tensor) -> Results:
    """The loss, the gradients and the buffers of one step."""
    loss.backward()  # type: ignore[no-untyped-call]  # of torch
    grads = {name: param.grad for name, param in model.named_parameters()}
    dense = {name: None if gradient is None else gradient.to_dense() for name, gradient in grads.items()}
    return {"loss": loss.detach(), **dense, **dict(model.named_buffers())}


def step_of(drawn: DrawnModel, number: int = 0) -> Results:
    model, program = drawn.program.model(), drawn.program
    torch.manual_seed(0)
    args, kwargs = program.inputs(0, number)
    return results(model, program.loss(model(*args, **kwargs)))


same = partial(torch.testing.assert_close, rtol=0, atol=0)


@share(1)
@given(models(without={"cond"}))
def test_a_drawn_model_is_finite_differentiable_and_repeats_bit_by_bit(drawn: DrawnModel) -> None:
    first = step_of(drawn)
    assert all(value is None or bool(value.isfinite().all()) for value in first.values())
    same(first, step_of(drawn))
    model = drawn.program.model()
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    without = {name for name, value in first.items() if value is None} & trained
    assert without < trained
    assert not without or "unused-parameter" in drawn.features


@share(0.6)
@given(models(without={"cond"}))
def test_a_printed_model_computes_the_same_in_a_namespace_of_its_own(drawn: DrawnModel) -> None:
    read_back = eval(repr(drawn), {"DrawnModel": DrawnModel, "step": step})
    assert read_back == drawn
    assert read_back.source == drawn.source
    module = ModuleType("pasted")
    with pytest.MonkeyPatch.context() as patch:  # as an import does: dataclasses look their module up
        patch.setitem(sys.modules, "pasted", module)
        exec(drawn.source, module.__dict__)
    with torch.random.fork_rng(devices=()):
        model = module.make_model()
        same(results(model, module.run_step(model)), step_of(drawn))


def test_each_feature_and_choice_is_drawn_and_told_and_no_draw_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: Counter[str] = Counter()
    monkeypatch.setattr(strategies, "event", lambda name: reported.update([name]))
    drawn_features: Counter[str] = Counter()
    choices: set[tuple[str, str, Any]] = set()
    endings: Counter[str] = Counter()

    @settings(max_examples=1200, derandomize=True, database=None)
    @given(models())
    def look(drawn: DrawnModel) -> None:
        drawn_features.update(drawn.features)
        choices.update((each.block, *option) for each in drawn.all_steps() for option in each.options)

    def note(run: dict[str, Any]) -> None:
        endings.update(each["status"] for each in run["generate-phase"]["test-cases"])

    with collector.with_value(note):  # type: ignore[arg-type]  # Hypothesis types it by its default
        look()
    assert set(drawn_features) == known_features()
    # the choices of a layer are features
    options = (
        (name, option, block.options[option])
        for name, block in BLOCKS.items()
        for option in block.options
        if option != "layer"
    )
    assert choices >= {(name, option, each) for name, option, allowed in options for each in allowed}
    # none is rejected: what Hypothesis does not let end are its short tries, and variants of earlier draws
    assert set(endings) <= {"valid", "overrun"}
    assert endings["valid"] >= 0.5 * endings.total()
    assert all(reported[feature] >= count for feature, count in drawn_features.items())


@share(0.5)
@given(st.sampled_from(sorted(known_features())), st.data())
def test_each_feature_can_be_switched_off(feature: str, data: st.DataObject) -> None:
    assert feature not in data.draw(models(without={feature}, max_steps=5)).features


def test_a_feature_that_there_is_not_is_refused_by_name() -> None:
    words = "^expected names of features, got 'convolution'; the features are: accum"
    with pytest.raises(UsageError, match=words):
        find(models(without={"convolution"}), lambda _: True)


PLANTED = ("conv", "sparse-embedding", "in-place-view", "tied-parameter")


@pytest.mark.nightly
def test_models_shrink_to_what_is_needed() -> None:
    found = [
        find(
            models(),
            lambda drawn, feature=feature: feature in drawn.features,  # type: ignore[misc]
            settings=settings(max_examples=500, database=None),
            random=Random(0),
        )
        for feature in PLANTED
    ]
    sizes = [len(list(drawn.all_steps())) for drawn in found]
    assert statistics.median(sizes) <= 2, found
    assert max(sizes) <= 3, found
    plain = {(drawn.takes, drawn.returns, drawn.width, drawn.batches, drawn.outputs) for drawn in found}
    assert plain == {("positional", "tuple", 8, (2,), ())}
