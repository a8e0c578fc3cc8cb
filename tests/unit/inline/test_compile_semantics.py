"""Strategy inline on one rank: whatever is asked of autograd, and of what model, the answer is eager DDP's.

Twins are shared by all tests of a model that leave no trace in them.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddpopt.dynamo.quiet import gc_paused
from ddpopt.testing.drawn import DrawnModel, Step, step
from tests.multigpu.models import hand_overs
from tests.unit.inline_twins import (
    ALL,
    LAYER_MB,
    WIDTH,
    Act,
    Net,
    Raising,
    Scaling,
    Twins,
    ViewLeaves,
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


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def keeping_graphs() -> Iterator[None]:
    """Let a graph be kept though its first backward did not ask for it; torch.compile refuses that."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


@pytest.fixture(scope="module")
def twins_of() -> Callable[[Any], Twins]:
    return functools.cache(Twins)


@pytest.fixture
def shared(twins_of: Callable[[Any], Twins]) -> Twins:
    return twins_of(Net)


# ------------------------------------------------------------------------------ what is asked of autograd


def hooked_before_its_node(call: Any, ddp: DistributedDataParallel) -> list[Tensor]:
    seen: list[Tensor] = []

    def double(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(gradients[0].clone())
        return (gradients[0] * 2,)

    node = get_gradient_edge(ddp.get_parameter("module.layers.1.weight")).node
    handle = node.register_prehook(double)
    train(call, ddp)
    handle.remove()
    return seen


def hooked_for_all(call: Any, ddp: DistributedDataParallel) -> list[Any]:
    seen: list[Any] = []
    handle = register_multi_grad_hook(
        [*ddp.parameters()], lambda gradients: seen.append([g.clone() for g in gradients if g is not None])
    )
    train(call, ddp)
    handle.remove()
    return seen


def twice_through_a_graph(call: Any, ddp: DistributedDataParallel) -> str:
    total = loss(call(rows()))
    backward(total)
    return error_of(lambda: backward(total))


def in_parts(call: Any, ddp: DistributedDataParallel) -> Tensor:
    output = call(rows())
    weight = ddp.get_parameter("module.layers.1.weight")
    (alone,) = torch.autograd.grad(output.sum(), [weight], retain_graph=True)
    backward(loss(output) * alone.norm())
    return alone


def checkpointed(call: Any, ddp: DistributedDataParallel) -> None:
    backward(loss(checkpoint(call, rows(), use_reentrant=False)))


def recomputed_and_kept(call: Any, ddp: DistributedDataParallel) -> int:
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        kept.append(call(x))
        return kept[-1]

    weight = ddp.get_parameter("module.layers.1.weight")
    total = loss(checkpoint(forward, rows(), use_reentrant=False, early_stop=False))
    backward(total + weight.square().sum())
    return len(kept)


def hooked_when_saved(call: Any, ddp: DistributedDataParallel) -> int:
    """How often a hook on saved tensors meets the parameter itself."""
    scale, seen = ddp.get_parameter("module.scale"), []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor is scale)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        total = loss(call(rows()))
    backward(total)
    return sum(seen)


def autocast_in_backward_alone(call: Any, ddp: DistributedDataParallel) -> None:
    total = loss(call(rows()))
    with torch.autocast("cpu", torch.bfloat16):
        backward(total)


def changed_since_the_forward(call: Any, ddp: DistributedDataParallel) -> None:
    total = loss(call(rows()))
    scale = ddp.get_parameter("module.scale")
    scale.data = scale.data * 2
    backward(total)


def raising_in_the_loss(call: Any, ddp: DistributedDataParallel) -> str:
    with ddp.no_sync():
        output = call(rows())
    return error_of(lambda: backward(loss(Raising.apply(output))))  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("keeping_graphs")
@pytest.mark.parametrize(
    ("act", "model", "handed"),
    [
        (hooked_before_its_node, Net, without("layers.1.weight")),
        (hooked_for_all, Net, []),
        (twice_through_a_graph, Net, ALL),
        (in_parts, Net, ALL),
        (checkpointed, Net, ALL),
        (recomputed_and_kept, Net, without("layers.1.weight")),
        (hooked_when_saved, Scaling, ["scale", *ALL]),
        (autocast_in_backward_alone, Net, ALL),
        (changed_since_the_forward, Scaling, ["scale", *ALL]),
        (raising_in_the_loss, Net, []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_whatever_is_asked_of_autograd_the_answer_is_eagers(
    act: Act, model: type[nn.Module], handed: list[str], twins_of: Callable[[Any], Twins]
) -> None:
    twins = twins_of(model)
    twins.act(train)
    for _ in range(STEPS):
        assert twins.act(act)[1] == handed
    assert set(twins.act(train)[1]) >= set(ALL)


@pytest.mark.usefixtures("keeping_graphs")
def test_double_backward_raises_torchs_own_error_and_nothing_is_handed_over(shared: Twins) -> None:
    def twice(call: Any, ddp: DistributedDataParallel) -> str:
        parameters = [*ddp.parameters()]
        gradients = torch.autograd.grad(loss(call(rows())), parameters, create_graph=True)
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        return error_of(lambda: torch.autograd.grad(total, parameters))

    shared.act(train)  # DDP no longer waits for a backward
    (eager, inline), handed = shared.apart(twice)
    assert (eager, handed) == ("", [])
    assert inline.startswith(
        "RuntimeError: torch.compile with aot_autograd does not currently support double"
    )


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

    assert Twins().act(looking)[0] is check_nan


# ---------------------------------------------------------------------------------------------- of what model


def frozen_and_ignored() -> Net:
    model = Net()
    model.layers[1].requires_grad_(False)
    wrapper: Any = DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(model, ["layers.2.weight"])
    return model


LAYER, BREAK, TIED = step("linear"), step("graph_break"), step("linear", layer="tied")


def drawn(*steps: Step) -> Callable[[], nn.Module]:
    return DrawnModel(steps, width=WIDTH).program.model


MODELS: dict[str, tuple[Callable[[], nn.Module], float, str]] = {
    "a parameter without a gradient holds up no other": (WithoutGradient, TINY_MB, "scale"),
    "nor in a bucket with others": (WithoutGradient, LAYER_MB, "scale"),
    "a gradient that needs nothing of the loss": (drawn(LAYER, step("scaled", scale="decayed")), TINY_MB, ""),
    "graph breaks": (drawn(LAYER, BREAK, LAYER, LAYER), TINY_MB, ""),
    "checkpointed layers": (drawn(*[step("checkpointed", body=(LAYER,))] * 3), TINY_MB, ""),
    "a view of a weight leaves a graph": (ViewLeaves, TINY_MB, "layers.2.weight"),
    "a weight that one graph reads twice": (drawn(LAYER, LAYER, TIED), TINY_MB, ""),
    "a weight that two graphs read": (drawn(LAYER, LAYER, BREAK, TIED), TINY_MB, "linear2.weight"),
    "frozen or ignored": (frozen_and_ignored, TINY_MB, "layers.1.weight layers.1.bias layers.2.weight"),
}
"""With the cap of buckets, and the parameters that are not handed over."""


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers_and_handed_over_where_they_may(name: str) -> None:
    model, cap_mb, waiting = MODELS[name]
    twins = Twins(model, bucket_cap_mb=cap_mb)
    names = [name for name, _ in twins.eager.module.named_parameters()]
    for _ in range(STEPS):
        assert sorted(twins.act(train)[1]) == sorted({*names} - {*waiting.split()})


def test_backward_with_inputs_fills_only_these_and_ddp_minds_as_ever() -> None:
    twins = Twins()
    wanted = ["layers.2.bias", "layers.1.weight"]

    def some(call: Any, ddp: DistributedDataParallel) -> None:
        backward(loss(call(rows())), inputs=[ddp.get_parameter(f"module.{name}") for name in wanted])

    assert twins.act(some)[1] == wanted
    assert [n for n, p in twins.inline.module.named_parameters() if p.grad is not None] == wanted[::-1]
    said, _ = twins.act(lambda call, ddp: error_of(lambda: call(rows())))
    assert "Expected to have finished reduction" in said


def test_two_modules_can_share_one_backward(shared: Twins) -> None:
    first, second = shared, Twins()

    def chained(call: Any, ddp: DistributedDataParallel) -> None:
        inner = first.step if ddp is second.inline else first.eager
        backward(loss(call(inner(rows()))))

    for _ in range(2):
        for ddp in (first.eager, first.inline):
            ddp.zero_grad()
        handed: list[str] = []
        with hand_overs(first.inline, handed.append):
            assert second.act(chained)[1] == ALL
        first.assert_equal()
        assert handed == ALL


# ------------------------------------------------------------------------------------ what is kept alive


def test_a_forwards_memory_is_freed_without_the_collector(shared: Twins) -> None:
    with gc_paused():
        for differentiated in (True, False):
            output = shared.step(rows())
            node, given = weakref.ref(output.grad_fn), weakref.ref(output)
            if differentiated:
                backward(loss(output))
            del output
            assert (node(), given()) == (None, None)


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
