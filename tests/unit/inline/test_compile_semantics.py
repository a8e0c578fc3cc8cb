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

from ddpopt.strategies.quiet import gc_paused
from ddpopt.testing.drawn import DrawnModel, Step, step
from tests.support.inline_twins import ALL, LAYER_MB, WIDTH, Act, Net, Twins, backward, loss, rows, train
from tests.support.models import hand_overs

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


class Scaling(Net):
    """A parameter that eager autograd saves as it is, and no view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Raising(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, raises: bool) -> Tensor:
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.raises:
            raise ZeroDivisionError("in the middle")
        return gradient, None


# ------------------------------------------------------------------------------ what is asked of autograd


def error_of(action: Callable[[], object]) -> str:
    """The error that this raises; empty if none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def without(name: str) -> list[str]:
    return [each for each in ALL if each != name]


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
    return error_of(lambda: backward(loss(Raising.apply(output, True))))  # type: ignore[no-untyped-call]


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
def test_autograd_answers_as_in_eager(act: Act, model: type[Net], handed: list[str], twins_of: Any) -> None:
    twins = twins_of(model)
    twins.act(train)
    for _ in range(STEPS):
        assert twins.act(act)[1] == handed
    assert set(twins.act(train)[1]) >= set(ALL)


# torch warns of a reference cycle, which the test breaks again
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.usefixtures("keeping_graphs")
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_double_backward_raises_torchs_own_error_and_nothing_is_handed_over(shared: Twins, by: str) -> None:
    def twice(call: Any, ddp: DistributedDataParallel) -> str:
        parameters = [*ddp.parameters()]
        if by == "grad":
            gradients = torch.autograd.grad(loss(call(rows())), parameters, create_graph=True)
        else:
            with ddp.no_sync():
                backward(loss(call(rows())), create_graph=True)
            gradients = tuple(parameter.grad for parameter in parameters if parameter.grad is not None)
        assert len(gradients) == len(ALL)
        total = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        error = error_of(lambda: torch.autograd.grad(total, parameters))
        if by == "backward":
            for gradient in gradients:
                gradient.detach_()
        return error

    shared.act(train)  # DDP no longer waits for a backward
    (eager, inline), handed = shared.apart(twice)
    assert eager == ""
    assert inline.startswith("RuntimeError: torch.compile with aot_autograd does not currently support dou")
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

    assert Twins().act(looking)[0] is check_nan


# ---------------------------------------------------------------------------------------------- of what model


class ViewLeaves(Net):
    """The first graph gives the second one a view of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, _ = self.layers
        weight = self.get_parameter("layers.2.weight").t()
        x = second(first(x).tanh()).tanh()
        torch._dynamo.graph_break()
        return x @ weight + self.get_parameter("layers.2.bias")


class Scaled(torch.autograd.Function):
    """Multiplies by a scale that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class WithoutGradient(Scaling):
    """A parameter that the graph reads, and for which its backward has no gradient."""

    def forward(self, x: Tensor) -> Any:
        return Scaled.apply(Net.forward(self, x), self.scale)  # type: ignore[no-untyped-call]


class RaisingInTheMiddle(Net):
    """Between two graphs, backward may raise."""

    raises = False

    def forward(self, x: Tensor) -> Any:
        first, second, third = self.layers
        x = self.middle(second(first(x).tanh()).tanh())
        return third(x).tanh()

    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # of torch
    def middle(self, x: Tensor) -> Any:
        return Raising.apply(x, self.raises)  # type: ignore[no-untyped-call]  # of torch


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


def test_an_exception_in_the_middle_of_backward_leaves_ddp_as_eager_does() -> None:
    twins = Twins(RaisingInTheMiddle, bucket_cap_mb=TINY_MB)
    twins.act(train)
    for ddp in (twins.eager, twins.inline):
        ddp.module.raises = True
    said, handed = twins.act(lambda call, ddp: error_of(lambda: train(call, ddp)))
    assert said == "ZeroDivisionError: in the middle"
    assert handed == ["layers.2.bias", "layers.2.weight"]
    for _ in range(2):
        said, _ = twins.act(lambda call, ddp: error_of(lambda: train(call, ddp)))
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
