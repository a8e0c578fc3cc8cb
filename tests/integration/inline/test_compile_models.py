"""Strategy inline on one rank: each kind of model and of training is eager DDP's, from copies to the end."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.multigpu.models import hand_overs
from tests.multigpu.single import single_rank
from tests.unit.inline_twins import (
    ALL,
    LAYER_MB,
    WIDTH,
    Broken,
    Checkpointed,
    Decaying,
    Net,
    RaisingInTheMiddle,
    Sums,
    Tied,
    TiedAndBroken,
    Twins,
    WithoutGradient,
    backward,
    error_of,
    loss,
    rows,
    train,
    without,
)

STEPS = 3
TINY_MB = 1e-6
"""One bucket for each parameter: a graph with a single bucket is compiled whole."""


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with single_rank():
        yield
    torch._dynamo.reset()


class Operators(TorchDispatchMode):
    """The names of all operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_gradients_are_handed_over_while_those_of_earlier_layers_are_not_computed_yet() -> None:
    twins = Twins()
    for _ in range(STEPS):
        total = loss(twins.step(rows()))
        with Operators() as operators:
            backward(total)
        names = operators.names
        behind = [names[i:].count("aten::mm") for i, name in enumerate(names) if name == "ddpopt::hand_over"]
        # two multiplications for each layer, but one for the first, whose input needs no gradient
        assert behind == [3, 1, 0]


def frozen_and_ignored() -> Net:
    model = Net()
    model.layers[1].requires_grad_(False)
    wrapper: Any = DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(model, ["layers.2.weight"])
    return model


@pytest.mark.parametrize(
    ("model", "cap_mb", "expected"),
    [
        pytest.param(WithoutGradient, TINY_MB, ALL, id="a parameter without a gradient holds up no other"),
        pytest.param(WithoutGradient, LAYER_MB, ALL, id="nor in a bucket with others"),
        pytest.param(Decaying, TINY_MB, ["scale", *ALL], id="a gradient that needs nothing of the loss"),
        pytest.param(Decaying, LAYER_MB, ["scale", *ALL], id="one such in a bucket with others"),
        pytest.param(Broken, TINY_MB, ALL, id="graph breaks"),
        pytest.param(Checkpointed, LAYER_MB, ALL, id="checkpointed layers"),
        pytest.param(
            TiedAndBroken,
            TINY_MB,
            without("layers.0.weight", "layers.2.weight"),
            id="a weight that two graphs read waits",
        ),
        pytest.param(
            frozen_and_ignored,
            TINY_MB,
            without("layers.1.weight", "layers.1.bias", "layers.2.weight"),
            id="what is frozen or ignored",
        ),
    ],
)
def test_gradients_are_eagers_and_handed_over_where_they_may(
    model: Callable[[], nn.Module], cap_mb: float, expected: list[str]
) -> None:
    twins = Twins(model, bucket_cap_mb=cap_mb)
    for _ in range(STEPS):
        assert twins.act(train)[2] == expected


def test_a_tied_weight_is_handed_over_once_where_one_graph_reads_it() -> None:
    twins = Twins(Tied)
    for _ in range(STEPS):
        assert sorted(twins.act(train)[2]) == sorted(without("layers.2.weight"))


def test_backward_with_inputs_fills_only_these_and_ddp_minds_as_ever() -> None:
    twins = Twins()
    wanted = ["layers.2.bias", "layers.1.weight"]

    def some(call: Any, ddp: DistributedDataParallel) -> None:
        backward(loss(call(rows())), inputs=[ddp.get_parameter(f"module.{name}") for name in wanted])

    assert twins.act(some)[2] == wanted
    assert [n for n, p in twins.inline.module.named_parameters() if p.grad is not None] == wanted[::-1]
    eager, inline, _ = twins.act(lambda call, ddp: error_of(lambda: call(rows())))
    assert "Expected to have finished reduction" in inline
    assert inline == eager


@pytest.fixture(scope="module")
def sums() -> Twins:
    return Twins(Sums)


def test_each_gradient_has_memory_of_its_own(sums: Twins) -> None:
    for _ in range(STEPS):
        handed = sums.act(train)[2]
        assert {"left", "right"} <= set(handed)
        addresses = {
            p.grad.untyped_storage().data_ptr() for p in sums.inline.parameters() if p.grad is not None
        }
        assert len(addresses) == len(ALL) + 2


def test_a_gradient_that_the_caller_gave_is_not_taken_for_a_parameters(sums: Twins) -> None:
    def given(call: Any, ddp: DistributedDataParallel) -> Tensor:
        gradient = torch.ones(3, WIDTH)
        torch.autograd.backward(call(rows()), gradient)
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        return gradient

    for _ in range(STEPS):
        eager, inline, _ = sums.act(given)
        assert torch.equal(inline, torch.ones(3, WIDTH))
        assert torch.equal(inline, eager)


def test_an_exception_in_the_middle_of_backward_leaves_ddp_as_eager_does() -> None:
    twins = Twins(RaisingInTheMiddle, bucket_cap_mb=TINY_MB)
    twins.act(train)
    for ddp in (twins.eager, twins.inline):
        ddp.module.raises = True
    eager, inline, handed = twins.act(lambda call, ddp: error_of(lambda: train(call, ddp)))
    assert inline == eager == "ZeroDivisionError: in the middle"
    assert handed == ["layers.2.bias", "layers.2.weight"]
    for _ in range(2):
        eager, inline, _ = twins.act(lambda call, ddp: error_of(lambda: train(call, ddp)))
        assert inline == eager
        assert "Expected to have finished reduction" in inline


def test_nothing_is_kept_alive_once_module_and_callable_are_gone() -> None:
    twins = Twins()
    for _ in range(2):
        train(twins.step, twins.inline)
    inline: Any = twins.inline
    parts = [inline, inline.reducer, twins.step, *inline.parameters()]
    alive = [weakref.ref(part) for part in parts]
    del twins, inline, parts
    gc.collect()
    assert [reference() for reference in alive if reference() is not None] == []


def test_two_modules_can_share_one_backward() -> None:
    first, second = Twins(), Twins()

    def chained(call: Any, ddp: DistributedDataParallel) -> None:
        inner = first.step if ddp is second.inline else first.eager
        backward(loss(call(inner(rows()))))

    for _ in range(STEPS):
        for ddp in (first.eager, first.inline):
            ddp.zero_grad()
        handed: list[str] = []
        with hand_overs(first.inline, handed.append):
            assert second.act(chained)[2] == ALL
        first.assert_equal()
        assert handed == ALL
