"""ddpopt.ddp.ready_hooks: a reducer hears of each gradient once, whoever brings it."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import impose
from ddpopt.ddp.ready_hooks import ReadyHooks, ready_hooks
from ddpopt.errors import HandOverError
from tests.support.models import Tower, arbitrary_plan, changing, gradients_of, hook_that_sees, same
from tests.support.refusals import refusal
from tests.support.turns import in_turn

pytestmark = pytest.mark.usefixtures("alone")
NAME = "layers.1.weight"


@pytest.fixture
def ddp() -> Any:
    return DistributedDataParallel(Tower(), bucket_cap_mb=1e-4)


def step(ddp: Any, inside: Callable[[Tensor], object] = lambda _: None) -> list[Tensor | None]:
    """One step's gradients; `inside` runs in its backward, when no gradient of a parameter has come yet."""
    ddp.zero_grad()
    loss = ddp(torch.ones(2, 6)).sum() * 1
    loss.register_hook(lambda gradient: inside(gradient) and None)
    torch.autograd.backward(loss)
    return gradients_of(ddp.module)


def place_of(hooks: ReadyHooks, ddp: DistributedDataParallel) -> int:
    return hooks.places[id(ddp.module.get_parameter(NAME))]


def take_over_and_give(hooks: ReadyHooks, ddp: DistributedDataParallel, _: object = None) -> None:
    hooks.take_over()
    hooks.hand_over(place_of(hooks, ddp), ddp.module.get_parameter(NAME), torch.zeros(6, 6), alone=False)


def buckets(ddp: DistributedDataParallel) -> list[tuple[str, ...]]:
    """Each bucket that leaves from now on."""
    seen: list[tuple[str, ...]] = []
    ddp.register_comm_hook(None, hook_that_sees(ddp, seen.append))
    return seen


@pytest.mark.parametrize(("take_over", "static_graph"), [(False, False), (True, False), (True, True)])
def test_the_reducer_hears_of_each_gradient_once(take_over: bool, static_graph: bool) -> None:
    ddp: Any = DistributedDataParallel(Tower(), bucket_cap_mb=1e-4, static_graph=static_graph)
    seen = buckets(ddp)
    expected = step(ddp)
    hooks = ready_hooks(ddp)
    for _ in range(3):
        seen.clear()
        assert not take_over or hooks.take_over()
        assert same([step(ddp)], [expected])
        assert len({name for names in seen for name in names}) == sum(map(len, seen)) == 11


def test_another_reducer_is_taken_over_again(ddp: Any) -> None:
    expected = step(ddp)
    hooks = ready_hooks(ddp)
    for seed in (1, 2):
        hooks.take_over()
        assert same([step(ddp)], [expected])
        impose(ddp, arbitrary_plan(ddp, seed))
        assert same([step(ddp)], [expected])


def test_a_second_contribution_in_the_same_backward_is_an_error(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    assert refusal(lambda: step(ddp, partial(take_over_and_give, hooks, ddp)), HandOverError) == (
        "parameter 'layers.1.weight': its gradient was handed to DDP from inside the compiled backward, and "
        "then another part of the same backward added to it. The bucket was sent without that part; discard "
        'this step. Compile with strategy="split", and please report this'
    )


def test_what_was_handed_over_in_a_backward_that_failed_does_not_count_in_the_next(ddp: Any) -> None:
    expected = step(ddp)
    hooks = ready_hooks(ddp)

    def inside(_: Tensor) -> None:
        take_over_and_give(hooks, ddp)
        raise ZeroDivisionError

    with ddp.no_sync(), pytest.raises(ZeroDivisionError):
        step(ddp, inside)
    assert same([step(ddp)], [expected])


def test_a_part_of_larger_memory_is_never_used_directly(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    parameter = ddp.module.get_parameter(NAME)
    for gradient in (torch.ones(12, 6)[:6], torch.ones(6, 6).t()):
        parameter.grad = None
        hooks.hand_over(place_of(hooks, ddp), parameter, gradient, alone=True)
        assert parameter.grad.data_ptr() != gradient.data_ptr()
        assert parameter.grad.stride() == parameter.stride()


def test_hooks_of_a_module_that_is_gone_do_not_disturb_another_one_of_the_same_parameters() -> None:
    model = Tower()
    first: Any = DistributedDataParallel(model)
    expected = step(first)
    ready_hooks(first).take_over()
    second: Any = DistributedDataParallel(model)
    leaves = ready_hooks(first).leaves
    del first
    gc.collect()
    assert same([step(second)], [expected])
    ready_hooks(second).take_over()
    assert same([step(second)], [expected])
    assert not any(ready_hooks(second).is_hooked(place) for place in range(len(leaves)))


OPTIONS: Any = ({}, {"find_unused_parameters": True}, {"static_graph": True})
HOOKED = in_turn(list(product(OPTIONS, (0, 1))), ("split", "inline"))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("options", "hooked_in", "strategy"), HOOKED, ids=str)
def test_a_hook_after_the_node_is_as_in_eager(strategy: Any, options: dict[str, Any], hooked_in: int) -> None:
    def trained(compiled: bool) -> list[Tensor | None]:
        model = Tower()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, **options)
        ddp.register_comm_hook(None, changing(lambda buffer: buffer + 1))
        call: Any = ddpopt.compile(ddp, backend="aot_eager", strategy=strategy) if compiled else ddp
        parameter = model.get_parameter(NAME)
        found: list[Tensor | None] = []

        def double(*_: object) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        for number in range(3):
            if number == hooked_in:
                get_gradient_edge(parameter).node.register_hook(double)
            ddp.zero_grad()
            torch.autograd.backward(call(torch.ones(2, 6)).sum())
            found += [None if g is None else g.clone() for g in gradients_of(model)]
        return found

    assert same([trained(True)], [trained(False)])
