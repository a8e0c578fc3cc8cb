"""ddpopt.ddp.ready_hooks: a reducer hears of each gradient once, whoever brings it."""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import impose
from ddpopt.ddp.ready_hooks import ReadyHooks, ready_hooks
from ddpopt.dynamo.quiet import gc_paused
from ddpopt.errors import HandOverError
from ddpopt.ranks.group import one_rank
from tests.multigpu.models import Tower, arbitrary_plan, changing, gradients_of, hook_that_sees, same
from tests.multigpu.turns import in_turn

NAME = "layers.1.weight"
UNUSED = ("optional.weight", "optional.bias")


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def ddp() -> Any:
    return DistributedDataParallel(Tower(), bucket_cap_mb=1e-4)


def step(
    ddp: DistributedDataParallel, inside: Callable[[Tensor], object] | None = None
) -> list[Tensor | None]:
    """One step's gradients; `inside` runs in its backward, when no gradient of a parameter has come yet."""
    ddp.zero_grad()
    output = ddp(torch.ones(2, 6)).sum()
    loss = output * 1
    if inside is not None:
        loss.register_hook(lambda gradient: inside(gradient) and None)
    torch.autograd.backward(loss)
    return gradients_of(ddp.module)


def place_of(hooks: ReadyHooks, ddp: DistributedDataParallel, name: str) -> int:
    return hooks.places[id(ddp.module.get_parameter(name))]


def give(hooks: ReadyHooks, ddp: DistributedDataParallel, name: str, gradient: Tensor) -> None:
    hooks.hand_over(place_of(hooks, ddp, name), ddp.module.get_parameter(name), gradient, alone=False)


def step_with_unused_parameters(
    ddp: Any, hooks: ReadyHooks, then: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """A step in which only we bring the gradients of two parameters, and `then` is called; returns these."""
    parameters = [ddp.module.get_parameter(name) for name in UNUSED]

    def inside(_: Tensor) -> None:
        hooks.take_over()
        for name, parameter in zip(UNUSED, parameters, strict=True):
            give(hooks, ddp, name, torch.full_like(parameter, 3.0))
        then()

    ddp.module.forward = functools.partial(ddp.module.forward, use_optional=False)
    step(ddp, inside)
    del ddp.module.forward
    return [parameter.grad for parameter in parameters]


def buckets(ddp: DistributedDataParallel) -> list[tuple[str, ...]]:
    """Each bucket that leaves from now on."""
    seen: list[tuple[str, ...]] = []
    ddp.register_comm_hook(None, hook_that_sees(ddp, seen.append))
    return seen


def assert_each_once(seen: list[tuple[str, ...]]) -> None:
    assert len({name for names in seen for name in names}) == sum(map(len, seen)) == 11


def test_a_module_has_one_set_of_hooks_with_a_place_for_each_parameter(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    assert ready_hooks(ddp) is hooks
    trained = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    assert [hooks.places[id(parameter)] for parameter in trained] == list(range(len(trained)))
    assert [leaf.variable is parameter for leaf, parameter in zip(hooks.leaves, trained, strict=True)] == (
        [True] * len(trained)
    )


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
        assert_each_once(seen)


def test_another_reducer_is_taken_over_anew(ddp: Any) -> None:
    expected = step(ddp)
    hooks = ready_hooks(ddp)
    for seed in (1, 2):
        hooks.take_over()
        assert same([step(ddp)], [expected])
        impose(ddp, arbitrary_plan(ddp, seed))
        assert same([step(ddp)], [expected])
    for _ in range(2):
        assert all(bool((gradient == 3).all()) for gradient in step_with_unused_parameters(ddp, hooks))
    assert same([step(ddp)], [expected])


def test_without_a_reducer_there_is_nothing_to_take_over(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    del ddp.reducer
    assert not hooks.take_over()


@pytest.mark.parametrize("frozen_first", [True, False], ids=["before the hooks", "after the hooks"])
def test_what_is_frozen_for_a_while_keeps_its_place(ddp: Any, frozen_first: bool) -> None:
    hooks = None if frozen_first else ready_hooks(ddp)
    next(ddp.parameters()).requires_grad_(False)
    hooks = hooks or ready_hooks(ddp)
    assert hooks.take_over()
    assert id(next(ddp.parameters())) in hooks.places


def test_where_a_parameter_was_replaced_the_reducer_is_left_alone(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    name, parameter = next(ddp.module.named_parameters())
    owner, _, last = name.rpartition(".")
    setattr(ddp.module.get_submodule(owner), last, nn.Parameter(parameter.detach().clone()))
    assert not hooks.take_over()


def test_what_is_handed_over_is_accumulated_and_told_at_once(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    seen = buckets(ddp)
    left: list[tuple[str, ...]] = []
    for _ in range(2):
        seen.clear()
        gradients = step_with_unused_parameters(ddp, hooks, lambda: left.extend(seen))
        assert all(bool((gradient == 3).all()) for gradient in gradients)
        assert_each_once(seen)
    assert left == [("optional.weight",)]  # once DDP has put first what came first


def test_a_second_contribution_in_the_same_backward_is_an_error(ddp: Any) -> None:
    hooks = ready_hooks(ddp)

    def inside(_: Tensor) -> None:
        hooks.take_over()
        give(hooks, ddp, NAME, torch.zeros(6, 6))

    with pytest.raises(HandOverError) as raised:
        step(ddp, inside)
    assert str(raised.value) == (
        "parameter 'layers.1.weight': its gradient was handed to DDP from inside the compiled backward, and "
        "then another part of the same backward added to it. The bucket has left without that part; discard "
        'this step. Compile with strategy="split", and please report this'
    )


def test_what_was_handed_over_in_a_backward_that_failed_does_not_count_in_the_next(ddp: Any) -> None:
    expected = step(ddp)
    hooks = ready_hooks(ddp)

    def inside(_: Tensor) -> None:
        hooks.take_over()
        give(hooks, ddp, NAME, torch.zeros(6, 6))
        raise ZeroDivisionError

    with ddp.no_sync(), pytest.raises(ZeroDivisionError):
        step(ddp, inside)
    assert same([step(ddp)], [expected])


@pytest.mark.parametrize("alone", [True, False])
def test_memory_is_taken_only_where_nobody_else_uses_it(ddp: Any, alone: bool) -> None:
    hooks = ready_hooks(ddp)
    parameter = ddp.module.get_parameter(NAME)
    gradient = torch.ones(6, 6)
    place = place_of(hooks, ddp, NAME)
    hooks.hand_over(place, parameter, gradient, alone)
    assert (parameter.grad.data_ptr() == gradient.data_ptr()) is alone
    hooks.hand_over(place, parameter, gradient.clone(), alone)
    assert torch.equal(parameter.grad, torch.full((6, 6), 2.0))


def test_a_part_of_larger_memory_is_never_taken(ddp: Any) -> None:
    hooks = ready_hooks(ddp)
    parameter = ddp.module.get_parameter(NAME)
    for gradient in (torch.ones(12, 6)[:6], torch.ones(6, 6).t()):
        parameter.grad = None
        hooks.hand_over(place_of(hooks, ddp, NAME), parameter, gradient, alone=True)
        assert parameter.grad.data_ptr() != gradient.data_ptr()
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("taken_over", [True, False])
def test_nothing_keeps_a_module_or_its_parameters_alive(taken_over: bool) -> None:
    ddp: Any = DistributedDataParallel(Tower())
    hooks = ready_hooks(ddp)
    if taken_over:
        hooks.take_over()
    step(ddp)
    references = [weakref.ref(part) for part in (hooks, ddp, ddp.reducer, *ddp.parameters())]
    with gc_paused():
        del hooks, ddp
        assert [reference() for reference in references if reference() is not None] == []


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
    assert leaves


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("options", "hooked_in", "strategy"),
    in_turn(
        list(product(({}, {"find_unused_parameters": True}, {"static_graph": True}), (0, 1))),
        ("split", "inline"),
    ),
    ids=str,
)
def test_a_hook_after_the_node_changes_what_ddp_has_taken_already(
    strategy: Any, options: dict[str, Any], hooked_in: int
) -> None:
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
