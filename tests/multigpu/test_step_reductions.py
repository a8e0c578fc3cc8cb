"""What DDP averages in a step of several forwards, backwards and modules, on several ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpopt
from ddpopt.errors import UsageError
from ddpopt.ranks.group import Ranks
from tests.support.models import Pair

if torch.__version__ < "2.13":
    pytest.skip("ddpopt.train_step needs torch 2.13 or newer", allow_module_level=True)


def differing(ranks: Ranks, found: Any, expected: Any) -> list[str]:
    """What differs, on any rank."""
    said = ""
    try:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    except AssertionError as error:
        said = str(error)
    return [each for each in ranks.gather(said) if each]


Steps = Callable[[Any, Any, Tensor], Any]


def another_backward_between(one: Any, other: Any, x: Tensor) -> None:
    output = sum(one(x))
    sum(other(x)).sum().backward()
    with one.no_sync():
        more = sum(one(x * 2))
    (output + more).sum().backward()


def local_around_the_other(one: Any, other: Any, x: Tensor) -> None:
    with one.no_sync():
        sum(one(x)).sum().backward()
    sum(other(x)).sum().backward()
    with one.no_sync():
        sum(one(x * 2)).sum().backward()


def through_both(one: Any, other: Any, x: Tensor) -> None:
    fake = sum(one(x))
    sum(other(fake.detach())).sum().backward()
    sum(other.module(fake)).sum().backward()


def local_after(one: Any, other: Any, x: Tensor) -> None:
    sum(one(x)).sum().backward()
    sum(other(x)).mean().backward()
    sum(one.module(x)).mean().backward()


def two_backwards(one: Any, other: Any, x: Tensor) -> None:
    outputs = one(x), other(x)
    for first, second in zip(*outputs, strict=True):
        (first * 2).sum().backward()
        second.sum().backward()


def half_the_outputs(one: Any, other: Any, x: Tensor) -> None:
    first, _ = one(x)
    _, second = other(x * 2)
    first.sum().backward()
    second.sum().backward()


def by_hand(one: Any, other: Any, x: Tensor) -> None:
    (sum(one(x)) + sum(other(x))).sum().backward()
    one.module.second.weight.square().sum().backward()


def only_by_hand(one: Any, other: Any, x: Tensor) -> None:
    first, _ = one(x, only=0)
    (first + sum(other(x))).sum().backward()
    one.module.second.weight.square().sum().backward()


def twice(one: Any, other: Any, x: Tensor) -> None:
    loss = (sum(one(x)) + sum(other(x))).sum()
    loss.backward(retain_graph=True)
    loss.backward()


NIGHT = pytest.mark.nightly


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        pytest.param({}, False, id="from None"),
        pytest.param({}, True, id="on gradients", marks=NIGHT),
        pytest.param({"find_unused_parameters": True}, False, id="unused", marks=NIGHT),
        pytest.param({"find_unused_parameters": True}, True, id="unused, on gradients", marks=NIGHT),
    ],
)
@pytest.mark.parametrize(
    "step",
    [
        another_backward_between,
        local_around_the_other,
        through_both,
        local_after,
        two_backwards,
        twice,
        half_the_outputs,
        by_hand,
    ],
)
def test_a_module_averages_what_its_own_forwards_and_backwards_say(
    ranks: Ranks, step: Steps, options: dict[str, Any], kept: bool
) -> None:
    if step is two_backwards and (kept or options):
        pytest.skip("refused, as the next test shows; with find_unused_parameters DDP fails")
    if step is half_the_outputs and not options:
        pytest.skip("DDP fails without find_unused_parameters")
    gradients = []
    for decorate in (lambda step: step, ddpopt.train_step(backend="aot_eager")):
        torch._dynamo.reset()
        models = DDP(Pair(), **options), DDP(Pair(), **options)
        run = decorate(step)
        for place in range(3):
            torch.manual_seed(10 * place + ranks.rank)
            run(*models, torch.randn(3, 12))
            found = [each.grad for model in models for each in model.parameters()]
            gradients.append([None if each is None else each.clone() for each in found])
            for model in models:
                model.zero_grad(set_to_none=not kept)
    assert not differing(ranks, gradients[3:], gradients[:3])


@pytest.mark.parametrize("step", [by_hand, only_by_hand])
def test_a_static_graph_reduces_in_its_first_backward(ranks: Ranks, step: Steps) -> None:
    gradients = []
    for decorate in (lambda step: step, ddpopt.train_step(backend="aot_eager")):
        torch._dynamo.reset()
        models = DDP(Pair(), static_graph=True), DDP(Pair(), static_graph=True)
        run = decorate(step)
        for place in range(3):
            torch.manual_seed(10 * place + ranks.rank)
            run(*models, torch.randn(3, 12))
            found = [each.grad for model in models for each in model.parameters()]
            gradients.append([None if each is None else each.clone() for each in found])
            for model in models:
                model.zero_grad()
    assert not differing(ranks, gradients[3:], gradients[:3])


def test_gradients_that_are_kept_must_come_from_one_backward(ranks: Ranks) -> None:
    models, x = (DDP(Pair()), DDP(Pair())), torch.ones(2, 12)
    run = ddpopt.train_step(two_backwards, backend="aot_eager")
    run(*models, x)
    with pytest.raises(UsageError, match=r"'first.bias' is used before all backwards; run them first"):
        run(*models, x)


def test_a_forward_without_a_backward_is_remembered(ranks: Ranks) -> None:
    def step(model: Any, x: Tensor, trains: bool, synchronized: bool) -> None:
        with nullcontext() if synchronized else model.no_sync():
            loss = sum(model(x)).sum()
            if trains:
                loss.backward()

    model, x = DDP(Pair()), torch.ones(2, 12)
    run = ddpopt.train_step(step, backend="aot_eager")
    run(model, x, False, True)
    with pytest.raises(UsageError, match="an earlier step called model and no backward followed"):
        run(model, x, True, False)
    run(model, x, True, True)
    run(model, x, True, False)


def test_a_gradient_of_one_rank_that_ddp_would_average_later_is_refused(ranks: Ranks) -> None:
    def step(model: Any, x: Tensor, parts: list[int]) -> None:
        for only in parts:
            with model.no_sync() if only else nullcontext():
                model(x, only=only)[only].sum().backward()

    for parts in ([[1, 0]], [[1], [0]], [[0, 1], [0]]):
        model, x = DDP(Pair(), find_unused_parameters=True), torch.ones(2, 12)
        run = ddpopt.train_step(step, backend="aot_eager")
        for calls in parts[:-1]:
            run(model, x, calls)
        with pytest.raises(UsageError, match=r"'second.bias'.* of model got a gradient of this rank alone"):
            run(model, x, parts[-1])
        with torch.no_grad():
            model.module.first.weight.zero_()  # nothing is left in pieces
