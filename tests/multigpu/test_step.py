"""The strategy step on several ranks: all that an eager step leaves, bit for bit, in the plan's buckets."""

import gc
import itertools
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn, optim
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.autograd.graph import get_gradient_edge
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.errors import DdpoptError, PlanMismatchError, UnsupportedError, UsageError
from ddpopt.ranks.group import Ranks
from tests.support.models import Pair, calling_inductor, params_of
from tests.support.refusals import refusal

if torch.__version__ < "2.13":
    pytest.skip("ddpopt.train_step needs torch 2.13 or newer", allow_module_level=True)
from ddpopt.step import tracing, transport

WIDTH, ROUNDS, CAP_MB = 12, 5, 6e-4
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Layers with everything that a step may find: dropout, BatchNorm, an unused and a frozen parameter."""

    def __init__(self, drop: float = 0.0, norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        weight: Any = self.layers[1].weight
        weight.data = weight.data.t().contiguous().t()  # its gradient has its strides
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.drop = nn.Dropout(drop)
        self.spare = nn.Linear(WIDTH, WIDTH) if unused else None
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, WIDTH) to the same shape."""
        for layer in self.layers:
            x = self.drop(torch.tanh(self.norm(layer(x.to(next(layer.parameters()).dtype)))).t()).t()
        return self.frozen(x.to(self.frozen.weight.dtype))  # type: ignore[no-any-return]


def sgd(**options: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    weights = [each for name, each in model.named_parameters() if name.endswith("weight")]
    biases = [each for name, each in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def loss_of(model: Any, x: Tensor, y: Tensor) -> Any:
    return nn.functional.mse_loss(model(x), y)


def finished(loss: Any, optimizer: Any) -> Any:
    """The loss, after a usual step from it."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def plain(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return finished(loss_of(model, x, y), optimizer)


def by_norm(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach(), "norm": norm}


def by_value(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    clip_grad_value_(model.parameters(), 0.001)
    optimizer.step()
    return loss.detach()


def accumulated(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    with model.no_sync():
        for part in range(2):
            (loss_of(model, x * part, y) / 3).backward()
    return finished(loss_of(model, x, y) / 3, optimizer)


def in_place_zeroed(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return [loss, x.shape[0]]


def by_hand(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = plain(model, optimizer, x, y)
    loss_of(model.module, y, x).backward()  # without DDP: of this rank alone
    with torch.no_grad():
        for each in model.module.layers.parameters():
            each -= 0.1 * each.grad
            each.grad = None if each.dim() > 1 else each.grad + loss
    return loss


def clamped(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        for each in model.module.layers[2:].parameters():
            torch.clamp(each, -0.2, 0.2, out=each)
    return plain(model, optimizer, x, y)


class Early(torch.autograd.Function):
    """Its gradient is ready in forward, as in a fused loss."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Any:
        """The sum of (WIDTH, WIDTH) times the squared (batch, WIDTH)."""
        ctx.save_for_backward(x.t() @ x)
        return (weight * (x.t() @ x)).sum()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        """The saved gradient."""
        return ctx.saved_tensors[0], None


def early(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y) + Early.apply(model.module.spare.weight, x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, 0.5)
    loss.backward()
    optimizer.step()
    return loss.detach()


def cast(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, x, y)
    return finished(loss, optimizer)


def rate_within(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    return plain(model, optimizer, x, y), optimizer.param_groups[0].get("capturable")


def listen(model: Any, *_: Any) -> Any:
    """Register hooks that change gradients, draw random numbers, and note when they run."""

    def changed(place: int, gradient: Tensor) -> Any:
        HEARD.append(place)
        return gradient + torch.randn_like(gradient) if place % 2 else None

    def kept(place: int, parameter: Any) -> None:
        HEARD.append(-place)
        parameter.grad.mul_(0.5)

    parameter: Any  # torch does not type its hooks
    trained = [each for each in model.parameters() if each.requires_grad]
    for place, parameter in enumerate(trained, 1):
        parameter.register_hook(partial(changed, place))
        parameter.register_hook(torch.neg)
        parameter.register_post_accumulate_grad_hook(partial(kept, place))


HEARD: list[int] = []
"""The places of parameters whose gradients came, and minus those that were accumulated."""


def told() -> list[int]:
    found = [*HEARD]
    HEARD.clear()
    return found


def heard(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return plain(model, optimizer, x, y), told()


def accumulated_and_heard(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return accumulated(model, optimizer, x, y), told()


def listening(make: Make) -> Make:
    """The optimizer of a model whose parameters have hooks."""
    return lambda model: (listen(model), make(model))[1]


def listen_later(model: Any, _: Any, step: int) -> None:
    if step == 2:
        listen(model)


def two_losses(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.noted = None
    output: Any = model(x)
    output.register_hook(torch.neg)
    near, small = nn.functional.mse_loss(output, y), output.abs().mean()
    optimizer.noted = near.detach()
    finished(near + 0.1 * small, optimizer)
    return optimizer.noted, small.detach()


def checkpointed(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    output: Any = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    return finished(nn.functional.mse_loss(output, y), optimizer)


@dataclass(frozen=True)
class Way:
    """A model, its optimizer and a step."""

    step: Callable[..., Any] = plain
    optimizer: Make = field(default_factory=lambda: sgd(momentum=0.9))
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    between: Callable[[Any, Any, int], None] = lambda *_: None
    rows: Callable[[int], int] = lambda _: 6
    graphs: int = 2


def halve(_: Any, optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5 + 0.1 * step


def reload(model: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())


def evaluate(model: Any, _: Any, step: int) -> None:
    if step == 1:
        model.eval()
        with torch.no_grad():
            model(torch.ones(3, WIDTH))
        model.train()


def impose(model: Any, _: Any, step: int) -> None:
    if step == 1:
        ddpopt.impose(model, ddpopt.plan(model.module, torch.ones(2, WIDTH), bucket_cap_mb=4 * CAP_MB))


def schedule(_: Any, optimizer: Any, step: int) -> None:
    if step == 0:
        step_of = type(optimizer).step
        optimizer.step = MethodType(lambda own: (step_of(own), step_of(own))[0], optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)


def regroup(_: Any, optimizer: Any, step: int) -> None:
    if step == 2:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]


class Slowing(optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.param_groups[0]["lr"] = 0.1 / self.count
        return super().step(closure)


def hook(model: Any, _: Any, step: int) -> None:
    if step == 2:
        model.module.layers[1].register_forward_hook(lambda _, __, output: output * 2)


def sending(register: Callable[[Any], object]) -> Callable[[Any, Any, int], None]:
    """Between the second and the third step, a communication hook is registered."""
    return lambda model, _, step: register(model) if step == 1 else None  # type: ignore[return-value]  # what it returns is not read


def adam(kind: Any = optim.Adam, **options: Any) -> Make:
    return lambda model: kind(model.parameters(), **{"lr": 0.01, **options})


c10d: Any = dist  # torch does not mark its re-exports


def bfloat16_hook(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What torch's own hook does, which DDP takes on a GPU only."""
    return default_hooks._compress_hook(torch.bfloat16, group, bucket)


SENDING: dict[str, Callable[[Any], object]] = {
    "averaging hook": lambda model: model.register_comm_hook(None, default_hooks.allreduce_hook),
    "float16 hook": lambda model: model.register_comm_hook(
        model.process_group, default_hooks.fp16_compress_hook
    ),
    "bfloat16 hook": lambda model: model.register_comm_hook(None, bfloat16_hook),
    "built-in averaging hook": lambda model: model._register_builtin_comm_hook(
        c10d.BuiltinCommHookType.ALLREDUCE
    ),
    "built-in float16 hook": lambda model: model._register_builtin_comm_hook(
        c10d.BuiltinCommHookType.FP16_COMPRESS
    ),
}
VIEWS = "gradient_as_bucket_view"
WAYS = {
    "all of SGD": Way(optimizer=sgd(momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True)),
    "two groups": Way(optimizer=two_groups, between=halve),
    "Adam": Way(optimizer=adam(amsgrad=True, weight_decay=0.1), tolerance=1e-4, between=halve),
    "Adagrad": Way(optimizer=adam(optim.Adagrad, lr_decay=0.1), between=halve, graphs=1),
    "RMSprop": Way(optimizer=adam(optim.RMSprop, centered=True, momentum=0.9), between=halve),
    "by hand": Way(by_hand, sgd()),
    "written before": Way(clamped, sgd(), graphs=1),
    "early gradient": Way(early, sgd(), model={"unused": True}, ddp={"static_graph": True}),
    "norm": Way(by_norm),
    "value, static graph": Way(by_value, model={"unused": True}, ddp={"static_graph": True, VIEWS: True}),
    "accumulation": Way(accumulated, model={"norm": True}),
    "zeroed in place": Way(in_place_zeroed, sgd(), graphs=2),
    "autocast": Way(cast),
    "two losses": Way(two_losses, sgd(momentum=0.9, nesterov=True, foreach=True), model={"drop": 0.3}),
    "BatchNorm": Way(model={"norm": True}, between=evaluate, graphs=3),
    "unused": Way(model={"unused": True}, ddp={"find_unused_parameters": True}),
    "learning rate": Way(optimizer=sgd(), between=halve, graphs=1),
    "reloaded": Way(between=reload),
    "batch size": Way(optimizer=sgd(), rows=lambda step: (6, 6, 5, 4, 7)[step], graphs=2),
    "checkpoint": Way(checkpointed, model={"drop": 0.3}),
    "regrouped": Way(optimizer=two_groups, between=regroup, graphs=3),
    "rate within": Way(rate_within, adam(optim.AdamW, lr=0.1, foreach=True), tolerance=1e-4, between=halve),
    "attribute": Way(optimizer=adam(Slowing), graphs=3),
    "imposed": Way(optimizer=sgd(), between=impose, graphs=2),
    "scheduled later": Way(optimizer=sgd(), between=schedule, graphs=2),
    "forward hook later": Way(between=hook, graphs=3),
    "hooks on parameters": Way(heard, listening(sgd(momentum=0.9)), graphs=2),
    "hooks, accumulation": Way(accumulated_and_heard, listening(sgd()), ddp={VIEWS: True}, graphs=1),
    "hooks later": Way(heard, sgd(), between=listen_later, graphs=2),
    **{name: Way(optimizer=sgd(), between=sending(register), graphs=2) for name, register in SENDING.items()},
    "fused SGD": Way(optimizer=sgd(momentum=0.9, nesterov=True, fused=True), between=halve),
    "fused Adam": Way(optimizer=adam(amsgrad=True, weight_decay=0.1, fused=True), between=halve),
    "fused AdamW": Way(by_norm, adam(optim.AdamW, fused=True), between=halve),
    "fused Adagrad": Way(optimizer=adam(optim.Adagrad, lr_decay=0.1, fused=True), between=halve),
    "fused, a tensor as rate": Way(optimizer=adam(lr=torch.tensor(0.01), fused=True)),
}


BY_DAY = ("norm",)
"""The ways that run by day where gradients are sent together; of the others every third does."""


def left(model: Any, optimizer: Any) -> Any:
    """Everything that training leaves."""
    state = [optimizer.state[each] for each in model.parameters() if each in optimizer.state]
    gradients = [each.grad for each in model.parameters()]
    return [*model.parameters(), *model.buffers(), state, gradients]


def trained(way: Way, ranks: Ranks, decorate: Callable[[Any], Any]) -> Iterator[Any]:
    """Everything that each step returns and leaves."""
    torch._dynamo.reset()
    model = DDP(Net(**way.model), bucket_cap_mb=CAP_MB, **way.ddp)
    optimizer, step = way.optimizer(model), decorate(way.step)
    for place in range(ROUNDS):
        torch.manual_seed(10 * place + ranks.rank)
        returned = step(model, optimizer, *torch.randn(2, way.rows(place), WIDTH))
        leaves = tree_leaves([returned, left(model, optimizer)])
        yield [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        way.between(model, optimizer, place)


def differences(ranks: Ranks, found: Any, expected: Any, tolerance: float) -> list[str]:
    """What differs, on any rank."""
    said = ""
    try:
        torch.testing.assert_close([*found], [*expected], rtol=tolerance, atol=tolerance, check_stride=True)
    except AssertionError as error:
        said = str(error)
    return [each for each in ranks.gather(said) if each]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("name", ["no hook", *SENDING])
def test_gradients_are_scaled_as_by_the_reducer_or_the_hook(
    ranks: Ranks, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on two ranks a division is a product; and one gradient has its place in the bucket from the start
    monkeypatch.setitem(transport.HOOKS, bfloat16_hook, transport.HOOKS[default_hooks.bf16_compress_hook])
    inputs = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(ranks.rank))
    found = []
    for decorate in (lambda step: step, ddpopt.train_step(backend="aot_eager")):
        torch.manual_seed(0)
        model = DDP(nn.Linear(WIDTH, WIDTH, bias=False))
        SENDING.get(name, lambda _: None)(model)
        decorate(plain)(model, sgd()(model), *inputs)
        found.append([each.detach() for each in model.parameters()])
    assert not differences(ranks, found[1], found[0], 0.0)


@pytest.mark.parametrize(
    ("name", "fusion"),
    [
        pytest.param(name, fusion, marks=() if name in by_day else pytest.mark.nightly)
        for name in WAYS
        for fusion, by_day in {"concat": [*WAYS][::3], "coalesced": BY_DAY}.items()
    ],
)
def test_a_step_leaves_what_eager_leaves(
    ranks: Ranks, name: str, fusion: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = WAYS[name]
    monkeypatch.setitem(transport.HOOKS, bfloat16_hook, transport.HOOKS[default_hooks.bf16_compress_hook])
    expected = [*trained(way, ranks, lambda step: step)]
    made: list[Any] = []

    def decorate(step: Any) -> Any:
        made.append(ddpopt.train_step(step, backend="aot_eager", fusion=fusion))
        return made[0]

    found = [*trained(way, ranks, decorate)]
    assert not differences(ranks, found, expected, way.tolerance)
    assert len(made[0].graphs) == way.graphs


def test_several_models_groups_dtypes_and_optimizers_may_be_closed_over(ranks: Ranks) -> None:
    runs = []
    ways: list[Any] = [lambda step: step, ddpopt.train_step(backend="aot_eager")]
    for decorate in ways:
        groups = [c10d.new_group([*range(ranks.size)]) for _ in range(2)]
        nets = [Net(), Net().double()]
        nets[0].layers[3] = nets[0].layers[1]  # tied
        nets[0].layers[2].double()
        models = [DDP(net, process_group=group) for net, group in zip(nets, groups, strict=True)]
        optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]

        @decorate  # type: ignore[untyped-decorator]  # one of them does nothing
        def step(x: Tensor, models: Any = models, optimizers: Any = optimizers) -> Any:
            losses = []
            for model, optimizer in zip(models, optimizers, strict=True):
                losses.append(model(x.double() if model is models[1] else x).square().mean())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            return [loss.detach() for loss in losses]

        torch.manual_seed(ranks.rank)
        losses = [loss for _ in range(3) for loss in step(torch.randn(4, WIDTH))]
        runs.append([*losses, *(each.detach() for model in models for each in model.parameters())])
    assert not differences(ranks, runs[1], runs[0], 0.0)


def test_modules_may_share_parameters_and_a_step_may_be_a_method(ranks: Ranks) -> None:
    class Trainer:
        def __init__(self) -> None:
            torch.manual_seed(0)
            trunk, heads = nn.Linear(WIDTH, WIDTH), [nn.Linear(WIDTH, 1) for _ in range(2)]
            self.models = [DDP(nn.Sequential(trunk, head)) for head in heads]
            self.optimizer = optim.SGD([*self.models[0].parameters(), *heads[1].parameters()], lr=0.1)

        def step(self, x: Tensor) -> Any:
            teacher, student = self.models
            with teacher.no_sync():
                wanted = teacher(x)
            loss = (student(x) - wanted.detach()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

    class Whole(Trainer):
        step = ddpopt.train_step(Trainer.step, backend="aot_eager")

    runs = []
    for trainer in (Trainer(), Whole()):
        torch.manual_seed(ranks.rank)
        losses = [trainer.step(torch.randn(4, WIDTH)) for _ in range(3)]
        runs.append([*losses, *(each.detach() for model in trainer.models for each in model.parameters())])
    alive = weakref.ref(trainer.models[0])
    del trainer
    assert not differences(ranks, runs[1], runs[0], 0.0)
    gc.collect()
    assert alive() is None


def replace_a_parameter(model: Any) -> None:
    layer = model.module.layers[1]
    layer.load_state_dict({"weight": layer.weight.clone()}, strict=False, assign=True)


def keep_a_hooked_node(model: Any) -> None:
    model.kept_node = get_gradient_edge(next(model.parameters())).node
    model.kept_node.register_hook(lambda *_: None)


LATER: dict[str, Callable[[Any, Tensor], object]] = {
    "were replaced": lambda model, _: replace_a_parameter(model),
    "model uses a communication hook that is none of torch's": lambda model, _: model.register_comm_hook(
        None, lambda state, bucket: default_hooks.allreduce_hook(state, bucket)
    ),
    "communication hook that is": lambda model, _: model.register_comm_hook(
        c10d.new_group(), default_hooks.allreduce_hook
    ),
    "AccumulateGrad node of model.module.layers.0.weight": lambda model, _: keep_a_hooked_node(model),
}


@pytest.mark.parametrize(
    "why",
    [pytest.param(why, marks=pytest.mark.nightly if place % 3 else ()) for place, why in enumerate(LATER)],
)
def test_what_a_later_step_would_ignore_is_an_error_each_time(ranks: Ranks, why: str) -> None:
    model = DDP(Net())
    optimizer, step = sgd()(model), ddpopt.train_step(plain, backend="aot_eager")
    x = torch.ones(2, WIDTH, requires_grad=True)
    step(model, optimizer, x, x)
    LATER[why](model, x)
    before = [each.detach().clone() for each in model.parameters()]
    for _ in range(2):
        with pytest.raises(UsageError if "replaced" in why else UnsupportedError, match=why):
            step(model, optimizer, x, x)
    assert all(map(torch.equal, model.parameters(), before))


def scaled(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    model.scaler.scale(loss).backward()
    model.scaler.step(optimizer)
    model.scaler.update()
    optimizer.zero_grad()
    return loss.detach()


def scaled_and_clipped(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = loss_of(model, x, y)
    model.scaler.scale(loss).backward()
    model.scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 0.05)
    model.scaler.step(optimizer)
    model.scaler.update()
    optimizer.zero_grad()
    return loss.detach(), norm


def with_own_state(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose state has an entry of the user's before it has its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for each in model.parameters():
        optimizer.state[each]["own"] = torch.ones(2)
    return optimizer


SCALED: dict[str, Make] = {
    "SGD": sgd(momentum=0.9, dampening=0.5),
    "own state": with_own_state,
    "RMSprop": adam(optim.RMSprop, centered=True, momentum=0.9),
    "fused Adam": adam(amsgrad=True, fused=True),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("optimizer", "step", "overflow"),
    [
        pytest.param(name, step, overflow, marks=() if place % 5 == 1 else pytest.mark.nightly)
        for place, (name, step, overflow) in enumerate(
            itertools.product(SCALED, (scaled, scaled_and_clipped), (0, 2, None))
        )
    ],
)
def test_what_a_scaler_skips_in_eager_is_skipped(
    ranks: Ranks, optimizer: str, step: Callable[..., Any], overflow: int | None
) -> None:
    """The loss of one rank overflows in one step; the scale falls then, and grows after two others."""

    def training(decorate: Callable[[Any], Any]) -> Iterator[Any]:
        torch._dynamo.reset()
        model: Any = DDP(Net(), bucket_cap_mb=CAP_MB)
        model.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        own = SCALED[optimizer](model)
        run = decorate(step)
        for place in range(ROUNDS):
            torch.manual_seed(10 * place + ranks.rank)
            x, y = torch.randn(2, 4, WIDTH)
            returned = run(model, own, x * (torch.inf if (place, ranks.rank) == (overflow, 1) else 1), y)
            for leaf in tree_leaves([returned, left(model, own), len(own.state), model.scaler.state_dict()]):
                yield leaf.nan_to_num() if isinstance(leaf, Tensor) else leaf

    expected = [*training(lambda function: function)]
    assert not differences(ranks, [*training(ddpopt.train_step(backend="aot_eager"))], expected, 0.0)


class Counting(optim.SGD):
    """Counts steps of each parameter in a number."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["count"] = self.state[each].get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_in_numbers_is_refused_under_a_scaler(ranks: Ranks) -> None:
    model: Any = DDP(Net())
    model.scaler = torch.amp.GradScaler("cpu")
    optimizer, step = adam(Counting)(model), ddpopt.train_step(scaled, backend="aot_eager")
    x = torch.ones(2, WIDTH)
    scaled(model, optimizer, x, x)
    words = "does not support GradScaler with an optimizer that counts"
    assert words in refusal(lambda: step(model, optimizer, x, x), DdpoptError)


def halved(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def test_a_hook_on_an_input_runs_as_in_eager(ranks: Ranks) -> None:
    found = []
    for decorate in (lambda step: step, ddpopt.train_step(backend="aot_eager")):
        torch._dynamo.reset()
        model = DDP(Net())
        x: Any = torch.ones(2, WIDTH, requires_grad=True)
        x.register_hook(lambda gradient: 2 * gradient)
        x.register_post_accumulate_grad_hook(halved)
        step = decorate(plain)
        for _ in range(2):
            step(model, sgd()(model), x, torch.zeros(2, WIDTH))
        found.append(x.grad)
    assert torch.equal(*found)


def test_the_limit_of_graphs_is_each_steps_own(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST", 2)
    x = torch.ones(2, WIDTH)
    models = [DDP(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    for model in models:
        step = ddpopt.train_step(plain, backend="aot_eager")
        step(model, sgd()(model), x, x)
    step(models[0], sgd()(models[0]), x, x)
    with pytest.raises(UnsupportedError, match=r"more than 2 graphs.*make a train_step for each model"):
        step(models[1], sgd()(models[1]), x, x)


@pytest.mark.world_size(2)
def test_ranks_that_differ_in_a_later_step_all_raise_and_may_go_on(ranks: Ranks) -> None:
    models = [DDP(nn.Linear(width, 1)) for width in (WIDTH, 1)]

    @ddpopt.train_step(backend="aot_eager")  # type: ignore[untyped-decorator]  # any function
    def step(x: Tensor, narrow: bool) -> None:
        (models[1](x[:, :1]) if narrow else models[0](x)).sum().backward()

    x = torch.ones(2, WIDTH)
    for narrow in (False, True):
        step(x, narrow)
    for _ in range(2):
        with pytest.raises(PlanMismatchError, match="do not communicate alike"):
            step(x, ranks.rank == 0)
    step(x * ranks.rank, False)
    gradients = ranks.gather(models[0].module.weight.grad)
    assert all(torch.equal(each, gradients[0]) for each in gradients)


def test_adam_is_bitwise_a_compiled_optimizer_after_eager_gradients(ranks: Ranks) -> None:
    def compiled(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = loss_of(model, x, y)
        loss.backward()
        torch.compile(optimizer.step, backend="aot_eager")()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.zero_grad()
        return loss.detach()

    expected = trained(Way(compiled, adam()), ranks, lambda step: step)
    found = trained(Way(optimizer=adam()), ranks, ddpopt.train_step(backend="aot_eager"))
    mine, its = ([step[:9] for step in run] for run in (found, expected))  # loss and parameters
    assert not differences(ranks, mine, its, 0.0)


def test_collectives_are_the_plans_buckets_and_the_explained_ones(ranks: Ranks) -> None:
    model = DDP(Net(), bucket_cap_mb=CAP_MB)
    optimizer, step = sgd()(model), ddpopt.train_step(plain, backend="aot_eager")
    with ddpopt.observe(model) as seen:
        for _ in range(3):
            step(model, optimizer, torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    (plan,) = step.plans
    assert len(plan.buckets) > 2
    assert [params_of(one) for one in seen.iterations] == [params_of(plan)] * 3
    sent = [[each.bucket for each in one.collectives] for one in seen.iterations]
    assert sent == [[*range(len(plan.buckets))]] * 3
    explained = ddpopt.explain(model, torch.ones(2, WIDTH))
    assert (explained.plan, explained.inline) == (plan, True)
    assert plan.fingerprint in str(explained)


def test_a_step_that_nobody_holds_keeps_nothing_alive(ranks: Ranks) -> None:
    def trained_once() -> list[weakref.ref[Any]]:
        model = DDP(nn.Linear(WIDTH, WIDTH))
        optimizer = sgd(momentum=0.9)(model)
        x = torch.ones(2, WIDTH)
        step = ddpopt.train_step(lambda: finished(loss_of(model, x, x), optimizer), backend="aot_eager")
        for _ in range(2):
            step()
        return [*map(weakref.ref, (step, model, model.module.weight, optimizer))]

    held = trained_once()
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_a_step_may_be_the_first_that_dynamo_traces(ranks: Ranks) -> None:
    torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()
    model = DDP(nn.Linear(2, 2))
    step = ddpopt.train_step(lambda x: torch.autograd.backward(model(x).sum()), backend="aot_eager")
    step(torch.ones(2, 2))
    assert model.module.weight.grad.tolist() == [[2.0, 2.0], [2.0, 2.0]]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return x + super().forward(x)  # type: ignore[no-untyped-call]  # torch leaves it untyped


INDUCTOR = ("inductor", calling_inductor)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", INDUCTOR)
def test_each_bucket_leaves_before_the_next_layer_is_computed_in_inductors_code(
    ranks: Ranks, backend: Any
) -> None:
    net = nn.Sequential(*(Residual(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(4)))
    model = DDP(net, bucket_cap_mb=sum(p.nbytes for p in net[0].parameters()) / 2**20)
    x, passed = torch.ones(8, 64), list[fx.Graph]()
    with fresh_cache(), inductor.patch(post_grad_custom_post_pass=passed.append):  # the user's own pass
        step = ddpopt.train_step(plain, backend=backend)
        _, codes = run_and_get_code(step, model, sgd()(model), x, x)
    calls = re.findall(r"extern_kernels\.(mm)\(|_c10d_functional\.(all_reduce)_\.|(wait)_tensor\.", codes[-1])
    order = " ".join("".join(call) for call in calls)
    assert order == "mm mm all_reduce " * 4 + "wait wait wait wait"
    assert len(passed) == 1


class Attention(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", INDUCTOR)
def test_inductors_code_computes_what_eager_does_with_dropout_and_another_rate_in_each_step(
    ranks: Ranks, backend: Any
) -> None:
    runs = []
    ways: list[Any] = [lambda step: step, ddpopt.train_step(backend=backend)]
    for decorate in ways:
        torch.manual_seed(0)
        model = DDP(Residual(nn.LayerNorm(8), Attention(8, 8)))
        optimizer, step = sgd(momentum=0.9)(model), decorate(plain)
        torch.manual_seed(ranks.rank)
        losses = []
        for place in range(3):
            losses.append(step(model, optimizer, *torch.randn(2, 5, 8)))
            halve(model, optimizer, place)
        runs.append([*losses, *(each.detach() for each in model.parameters())])
    assert not differences(ranks, runs[1], runs[0], 1e-4)


def twice(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()
    with model.no_sync():
        model(x)
    model(x).sum().backward()


def hooking(model: Any, x: Tensor) -> None:
    handle = model.module.layers[0].bias.register_hook(torch.neg)
    model(x).sum().backward()
    handle.remove()


def once(model: Any, x: Tensor) -> None:
    model(x).sum().backward()


def dropping() -> Any:
    """A model with a hook that sets a gradient to None."""
    model: Any = DDP(Net())
    model.module.layers[0].bias.register_post_accumulate_grad_hook(drop)
    return model


def drop(parameter: Any) -> None:
    parameter.grad = None


def branching(model: Any, x: Tensor) -> None:
    loss = model(x).sum()
    if loss > 0:
        loss = 2 * loss
    loss.backward()


def differing(model: Any, x: Tensor) -> None:
    with model.no_sync() if c10d.get_rank() else nullcontext():
        model(x).sum().backward()


def branching_first(model: Any, x: Tensor) -> None:
    if c10d.get_rank() and x.sum() > 0:
        x = x * 2
    model(x).sum().backward()


def counting(model: Any, x: Tensor) -> None:
    model(x).sum().backward()
    torch.manual_seed(0)


def updating(model: Any, x: Tensor, optimizer: Any) -> None:
    model(x).sum().backward()
    optimizer.step()


def partly(model: Any, x: Tensor) -> None:
    model.module.layers[0](model(x).detach()).sum().backward()


def by_turns(model: Any, x: Tensor) -> None:
    for output in model(x):
        output.sum().backward()


def twice_called(model: Any, x: Tensor) -> None:
    first, _ = model(x, only=0)
    _, second = model(x, only=1)
    (first + second).sum().backward()


def written(model: Any, x: Tensor) -> None:
    output = model(x)
    output.mul_(2)
    output.sum().backward()


OTHER = nn.Linear(2, 2)
MADE: dict[str, Callable[[], Any]] = {
    "a hook that drops": dropping,
    "called twice": lambda: DDP(Pair(), find_unused_parameters=True),
    "by turns": lambda: DDP(Pair(), static_graph=True),
    "written output": lambda: DDP(Net(), static_graph=True),
}
"""The models of refusals that need another one."""
REFUSED: dict[str, tuple[Any, str]] = {
    "no DDP module": (lambda model, x: model.module(x).sum(), "and it calls none"),
    "twice": (
        twice,
        "two backward passes of one step reduce the gradient of 'layers.3.bias' of model",
    ),
    "a hook that drops": (once, "set its gradient to None before it is reduced"),
    "its own hook": (hooking, "does not support hooks on model.module.layers.0.bias; use ddpopt.compile"),
    "branch": (branching, "in branching: `if loss > 0:`: it depends on values of a tensor"),
    "ranks differ": (differing, "the ranks' steps do not communicate alike"),
    "branch on one rank, first": (
        branching_first,
        "in branching_first: `if c10d.get_rank() and x.sum() > 0:`",
    ),
    "generator": (counting, "in counting: `torch.manual_seed(0)`"),
    "partly": (partly, "model got no gradient for 'layers.1.weight', 'layers.1.bias', 'layers.2"),
    "by turns": (by_turns, " of model gets no gradient in the backward in which others"),
    "called twice": (twice_called, "although the outputs of the module's last forward do not depend on it"),
    "written output": (written, "an output of model, which DDP with static_graph=True copies in its first"),
    "another model's optimizer": (updating, "optimizer (SGD) holds no parameter of model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_said_and_leaves_everything_as_it_was(ranks: Ranks, name: str) -> None:
    function, words = REFUSED[name]
    model = MADE.get(name, lambda: DDP(Net()))()
    more = (optim.SGD(OTHER.parameters()),) if name == "another model's optimizer" else ()
    before = [each.clone() for each in model.parameters()]
    flags = (
        [DDP.forward, optim.Optimizer.zero_grad, torch.autograd.backward],
        torch.get_rng_state(),
        dict(vars(model)),
    )
    step: Any = ddpopt.train_step(function, backend="aot_eager")
    try:
        raise UsageError("another error, which is being handled")
    except UsageError:
        assert words in refusal(lambda: step(model, torch.ones(2, WIDTH), *more), DdpoptError)
    assert flags[0] == [DDP.forward, optim.Optimizer.zero_grad, torch.autograd.backward]
    assert torch.equal(torch.get_rng_state(), flags[1])
    assert dict(vars(model)) == flags[2]
    assert all(map(torch.equal, model.parameters(), before))
    assert all(type(each) is nn.Parameter for each in model.parameters())


WATCHING: dict[str, Callable[[], Any]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


@pytest.mark.parametrize("name", WATCHING)
def test_a_mode_that_watches_operators_is_refused_and_does_no_harm(ranks: Ranks, name: str) -> None:
    model = DDP(Net())
    optimizer, step = sgd()(model), ddpopt.train_step(plain, backend="aot_eager")
    x = torch.ones(2, WIDTH)
    before = [each.detach().clone() for each in model.parameters()]
    with WATCHING[name](), pytest.raises(UnsupportedError, match=f"under {name}"):
        step(model, optimizer, x, x)
    assert all(map(torch.equal, model.parameters(), before))
    step(model, optimizer, x, x)
    assert len(step.graphs) == 1


def test_a_fallback_is_eager_around_a_compiled_model(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ddpopt")
    gradients = []
    for decorate in (lambda step: step, ddpopt.train_step(backend="aot_eager", fallback="inline")):
        torch._dynamo.reset()
        model, step = DDP(Net(), bucket_cap_mb=CAP_MB), decorate(branching)
        for _ in range(2):
            step(model, torch.full((2, WIDTH), ranks.rank + 1.0))
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert imposed_plan(model) is not None
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert sum("the step runs in eager around a compiled model" in each for each in caplog.messages) == 1
