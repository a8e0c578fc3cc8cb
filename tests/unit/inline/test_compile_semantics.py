"""Strategy inline on one rank: whatever is asked of autograd, the answer is eager DDP's.

All tests share one module, and leave no trace in it.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.multigpu.models import same
from tests.multigpu.single import single_rank
from tests.unit.inline_twins import (
    ALL,
    Raising,
    Scaling,
    Twins,
    backward,
    error_of,
    loss,
    rows,
    train,
    without,
)

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with single_rank():
        yield
    torch._dynamo.reset()


@pytest.fixture
def keeping_graphs() -> Iterator[None]:
    """Let a graph be kept though its first backward did not ask for it; torch.compile refuses that."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.fixture(scope="module")
def shared() -> Twins:
    """For tests that leave no trace in them."""
    return Twins()


def test_a_tensor_hook_runs_once_a_step_with_eagers_value_and_counts(shared: Twins) -> None:
    def hooked(call: Any, ddp: DistributedDataParallel) -> list[Tensor]:
        seen: list[Tensor] = []

        def double(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        handle = ddp.get_parameter("module.layers.1.weight").register_hook(double)  # type: ignore[no-untyped-call]
        train(call, ddp)
        handle.remove()
        return seen

    for _ in range(STEPS):
        eager, inline, handed = shared.act(hooked)
        assert len(eager) == len(inline) == 1
        assert torch.equal(eager[0], inline[0])
        assert handed == without("layers.1.weight")
    assert shared.act(train)[2] == ALL


def test_a_hook_after_accumulation_runs_once_a_step_before_the_optimizer_does(shared: Twins) -> None:
    def hooked(call: Any, ddp: DistributedDataParallel) -> list[Any]:
        seen: list[Any] = []
        parameter = ddp.get_parameter("module.layers.1.bias")
        handle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda p: seen.append((p.grad.clone(), p.detach().clone()))
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            train(call, ddp)
            seen.append((None, parameter.detach().clone()))
            optimizer.step()
        handle.remove()
        return seen

    eager, inline, handed = shared.act(hooked)
    assert [gradient is None for gradient, _ in inline] == [False, True] * 2
    for (gradient, value), (own_gradient, own_value) in zip(eager, inline, strict=True):
        assert gradient is own_gradient is None or torch.equal(gradient, own_gradient)
        assert torch.equal(value, own_value)
    assert handed == without("layers.1.bias") * 2


def test_a_hook_that_waits_for_several_gradients_runs_once_with_all_of_them(shared: Twins) -> None:
    def hooked(call: Any, ddp: DistributedDataParallel) -> list[list[Tensor]]:
        seen: list[list[Tensor]] = []
        handle = register_multi_grad_hook(
            [*ddp.parameters()],
            lambda gradients: seen.append([g.clone() for g in gradients if g is not None]),
        )
        train(call, ddp)
        handle.remove()
        return seen

    eager, inline, handed = shared.act(hooked)
    assert same(inline, eager)
    assert [len(gradients) for gradients in inline] == [len(ALL)]
    assert handed == []


def test_autograd_grad_leaves_grad_alone_and_gives_eagers_values(shared: Twins) -> None:
    def gradients(call: Any, ddp: DistributedDataParallel) -> list[Tensor]:
        return [*torch.autograd.grad(loss(call(rows())), [*ddp.parameters()])]

    eager, inline, handed = shared.act(gradients)
    assert same([inline], [eager])
    assert handed == []
    assert all(parameter.grad is None for parameter in shared.inline.parameters())
    assert shared.act(train)[2] == ALL


def test_the_gradient_of_an_input_is_eagers(shared: Twins) -> None:
    def gradient(call: Any, ddp: DistributedDataParallel) -> Tensor | None:
        x = rows().requires_grad_()
        backward(loss(call(x)))
        return x.grad

    eager, inline, handed = shared.act(gradient)
    assert same([[inline]], [[eager]])
    assert handed == ALL


@pytest.mark.usefixtures("keeping_graphs")
def test_double_backward_raises_torchs_own_error(shared: Twins) -> None:
    def twice(call: Any, ddp: DistributedDataParallel) -> str:
        gradients = torch.autograd.grad(loss(call(rows())), [*ddp.parameters()], create_graph=True)
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        return error_of(lambda: torch.autograd.grad(total, [*ddp.parameters()]))

    eager, inline, handed = shared.act(twice)
    assert eager == ""
    assert inline.startswith(
        "RuntimeError: torch.compile with aot_autograd does not currently support double"
    )
    assert handed == []


@pytest.mark.parametrize("check_nan", [True, False])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_gradient_that_is_not_a_number_is_found_as_in_eager(check_nan: bool) -> None:
    def looking(call: Any, ddp: DistributedDataParallel) -> bool:
        x = rows()
        x[0, 0] = torch.inf  # only a weight's gradient is not a number
        with torch.autograd.detect_anomaly(check_nan=check_nan), ddp.no_sync():
            found = "nan values" in error_of(lambda: backward(loss(call(x))))
        ddp.zero_grad()
        return found

    eager, inline, _ = Twins().act(looking)
    assert eager is inline is check_nan


# torch warns of a reference cycle, which the test breaks again
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.usefixtures("keeping_graphs")
def test_gradients_that_are_to_be_differentiated_are_not_handed_over(shared: Twins) -> None:
    def twice(call: Any, ddp: DistributedDataParallel) -> str:
        with ddp.no_sync():
            backward(loss(call(rows())), create_graph=True)
        gradients = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        error = error_of(lambda: torch.autograd.grad(total, [*ddp.parameters()]))
        assert len(gradients) == len(ALL)
        for gradient in gradients:
            gradient.detach_()
        return error

    shared.act(train)  # DDP no longer waits for a backward
    eager, inline, handed = shared.act(twice)
    assert eager == ""
    assert inline.startswith(
        "RuntimeError: torch.compile with aot_autograd does not currently support double"
    )
    assert handed == []


def test_a_second_backward_without_retain_graph_raises_torchs_own_error(shared: Twins) -> None:
    def twice(call: Any, ddp: DistributedDataParallel) -> str:
        total = loss(call(rows()))
        backward(total)
        return error_of(lambda: backward(total))

    eager, inline, _ = shared.act(twice)
    assert inline == eager
    assert "Trying to backward through the graph a second time" in inline


@pytest.mark.usefixtures("keeping_graphs")
def test_parts_of_a_loss_can_be_differentiated_one_after_the_other(shared: Twins) -> None:
    def parts(call: Any, ddp: DistributedDataParallel) -> list[Tensor]:
        output = call(rows())
        weight = ddp.get_parameter("module.layers.1.weight")
        (alone,) = torch.autograd.grad(output.sum(), [weight], retain_graph=True)
        backward(loss(output) * alone.norm())
        return [alone]

    eager, inline, handed = shared.act(parts)
    assert same([inline], [eager])
    assert handed == ALL


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_whole_step_can_be_checkpointed(shared: Twins, early_stop: bool) -> None:
    def recomputed(call: Any, ddp: DistributedDataParallel) -> None:
        backward(loss(checkpoint(call, rows(), use_reentrant=False, early_stop=early_stop)))

    shared.act(train)
    for _ in range(STEPS):
        assert shared.act(recomputed)[2] == ALL


def test_what_a_recomputation_leaves_behind_takes_no_gradient(shared: Twins) -> None:
    kept: list[Tensor] = []

    def recomputed(call: Any, ddp: DistributedDataParallel) -> None:
        def forward(x: Tensor) -> Tensor:
            kept.append(call(x))
            return kept[-1]

        weight = ddp.get_parameter("module.layers.1.weight")
        total = loss(checkpoint(forward, rows(), use_reentrant=False, early_stop=False))
        backward(total + weight.square().sum())

    shared.act(train)
    for _ in range(STEPS):
        assert shared.act(recomputed)[2] == without("layers.1.weight")
    assert len(kept) == 4 * STEPS


def test_saved_tensors_may_be_moved_elsewhere(shared: Twins) -> None:
    def moved(call: Any, ddp: DistributedDataParallel) -> None:
        with save_on_cpu():
            total = loss(call(rows()))
        backward(total)

    assert shared.act(moved)[2] == ALL


def test_hooks_on_saved_tensors_meet_the_parameters_themselves() -> None:
    def hooked(call: Any, ddp: DistributedDataParallel) -> int:
        scale, seen = ddp.get_parameter("module.scale"), []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor is scale)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            total = loss(call(rows()))
        backward(total)
        return sum(seen)

    assert Twins(Scaling).act(hooked) == (1, 1, ["scale", *ALL])


def test_a_backward_reads_what_a_parameter_was_given_since_the_forward() -> None:
    def given(call: Any, ddp: DistributedDataParallel) -> None:
        total = loss(call(rows()))
        scale = ddp.get_parameter("module.scale")
        scale.data = scale.data * 2
        backward(total)

    twins = Twins(Scaling)
    for _ in range(2):
        assert twins.act(given)[2] == ["scale", *ALL]


def test_an_exception_in_the_loss_or_in_no_sync_leaves_ddp_as_eager_does(shared: Twins) -> None:
    def raising(call: Any, ddp: DistributedDataParallel) -> str:
        with ddp.no_sync():
            output = call(rows())
        return error_of(lambda: backward(loss(Raising.apply(output, True))))  # type: ignore[no-untyped-call]

    for _ in range(2):
        eager, inline, handed = shared.act(raising)
        assert inline == eager == "ZeroDivisionError: in the middle"
        assert handed == []
        assert shared.act(train)[2] == ALL


def test_a_forwards_memory_is_freed_without_the_collector(shared: Twins) -> None:
    collecting = gc.isenabled()
    gc.disable()
    try:
        for differentiated in (True, False):
            output = shared.step(rows())
            node, given = weakref.ref(output.grad_fn), weakref.ref(output)
            if differentiated:
                backward(loss(output))
            del output
            assert (node(), given()) == (None, None)
    finally:
        if collecting:
            gc.enable()
