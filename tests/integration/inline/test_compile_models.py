"""Strategy inline on one rank: each kind of model and of training is eager DDP's, from copies to the end."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import ddpopt
from tests.multigpu.models import gradients_of, hand_overs, same
from tests.multigpu.single import single_rank
from tests.unit.inline_twins import (
    ALL,
    LAYER_MB,
    WIDTH,
    Broken,
    Checkpointed,
    Decaying,
    Net,
    Normed,
    RaisingInTheMiddle,
    Sums,
    Tied,
    TiedAndBroken,
    Twins,
    WithoutGradient,
    backward,
    error_of,
    loss,
    optimizers,
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


def test_a_tied_weight_is_handed_over_once_where_one_graph_reads_it() -> None:
    twins = Twins(Tied)
    for _ in range(STEPS):
        handed = twins.act(train)[2]
        assert sorted(handed) == sorted(without("layers.2.weight"))


@pytest.mark.parametrize("cap_mb", [TINY_MB, LAYER_MB], ids=["apart", "together"])
def test_a_parameter_without_a_gradient_holds_up_no_other(cap_mb: float) -> None:
    twins = Twins(WithoutGradient, bucket_cap_mb=cap_mb)
    for _ in range(STEPS):
        assert twins.act(train)[2] == ALL


@pytest.mark.parametrize("cap_mb", [TINY_MB, LAYER_MB], ids=["apart", "together"])
def test_a_gradient_that_needs_nothing_of_the_loss_is_handed_over_in_the_backward(cap_mb: float) -> None:
    twins = Twins(Decaying, bucket_cap_mb=cap_mb)
    for _ in range(STEPS):
        assert twins.act(train)[2] == ["scale", *ALL]


def test_graph_breaks_are_no_hindrance() -> None:
    twins = Twins(Broken, bucket_cap_mb=TINY_MB)
    for _ in range(STEPS):
        assert twins.act(train)[2] == ALL


def test_a_weight_that_two_graphs_read_waits() -> None:
    twins = Twins(TiedAndBroken, bucket_cap_mb=TINY_MB)
    for _ in range(STEPS):
        assert twins.act(train)[2] == without("layers.0.weight", "layers.2.weight")


def test_what_is_frozen_or_ignored_is_not_handed_over() -> None:
    def factory() -> Net:
        model = Net()
        model.layers[1].requires_grad_(False)
        wrapper: Any = DistributedDataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(model, ["layers.2.weight"])
        return model

    twins = Twins(factory, bucket_cap_mb=TINY_MB)
    for _ in range(STEPS):
        handed = twins.act(train)[2]
        assert handed == without("layers.1.weight", "layers.1.bias", "layers.2.weight")


def test_optimizers_that_run_in_backward_see_eagers_gradients() -> None:
    twins = Twins()
    for ddp in (twins.eager, twins.inline):
        for parameter in ddp.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        assert twins.act(train)[2] == []


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


def test_checkpointed_layers_have_eagers_gradients() -> None:
    twins = Twins(Checkpointed)
    for _ in range(STEPS):
        assert twins.act(train)[2] == ALL


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


def test_under_no_sync_an_exception_behind_some_gradients_leaves_those_there() -> None:
    twins = Twins(RaisingInTheMiddle, bucket_cap_mb=TINY_MB)
    twins.act(train)

    def raising(call: Any, ddp: DistributedDataParallel) -> str:
        ddp.module.raises = True
        with ddp.no_sync():
            error = error_of(lambda: train(call, ddp))
        ddp.module.raises = False
        return error

    eager, inline, handed = twins.act(raising)
    assert inline == eager == "ZeroDivisionError: in the middle"
    assert handed == ["layers.2.bias", "layers.2.weight"]
    assert twins.act(train)[2] == ALL


def test_copies_are_plain_ddp_train_on_their_own_and_can_be_compiled_too() -> None:
    twins = Twins()
    twins.act(train)
    before = gradients_of(twins.inline)
    assert list(twins.inline.state_dict()) == list(twins.eager.state_dict())
    copies = [copy.deepcopy(twins.inline), pickle.loads(pickle.dumps(twins.inline))]
    calls = [*copies, ddpopt.compile(copies[0], backend="aot_eager", strategy="inline")]
    for call, own in zip(calls, (*copies, copies[0]), strict=True):
        handed: list[str] = []
        own.zero_grad()
        with hand_overs(own, handed.append), hand_overs(twins.inline, pytest.fail):
            train(call, own)
        assert handed == ([] if call is own else ALL)
        assert same([gradients_of(own)], [before])
    assert same([gradients_of(twins.inline)], [before])
    assert twins.act(train)[2] == ALL


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


def test_evaluation_and_buffers_between_training_steps_are_eagers() -> None:
    twins = Twins(Normed)
    optimizer = optimizers(twins)

    def step(call: Any, ddp: DistributedDataParallel) -> list[Tensor]:
        train(call, ddp)
        optimizer[ddp].step()
        call.eval()
        with torch.no_grad():
            outputs = [call(rows(2)), call(rows(3))]
        call.train()
        with torch.no_grad():
            outputs.append(call(rows(4)))
        return outputs

    for _ in range(STEPS):
        eager, inline, handed = twins.act(step)
        assert same([inline], [eager])
        assert len(handed) == len(ALL) + 2


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
