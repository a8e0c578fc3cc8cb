"""Inductor: DDP gets the memory that generated code is done with; caches give back what was put in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.autograd.function import once_differentiable
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.ready_hooks import ReadyHooks
from ddpopt.gate.overlap import measure
from ddpopt.inline import inductor
from ddpopt.inline.handover import COPIED, LATE, TAKEN, Call
from ddpopt.testing import resolve
from ddpopt.testing.drawn import DrawnModel, step
from tests.support.models import calling_inductor, completed

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")

SIZE = (8, 16)
CAP_MB = 8 * 8 * 4 / 2**20


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module, call: Any, *inputs: Tensor) -> list[Tensor]:
    call(*inputs).square().mean().backward()
    found = [p.grad for p in module.parameters() if p.grad is not None]
    return [gradient.to_dense() if gradient.is_sparse else gradient for gradient in found]


# -------------------------------------------------------------------------------- the memory of a gradient


class Saved(torch.autograd.Function):
    """Multiplies by one, and returns what it saved as the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, saved: Tensor, copied: bool) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.copied = copied
        return value * 1.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        return saved.clone() if ctx.copied else saved, None, None


class Net(nn.Module):
    """A weight that is watched in the middle of two layers; `work` says what it is used for."""

    def __init__(self, work: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.watched = nn.Parameter(torch.randn(SIZE))
        self.other = nn.Parameter(torch.randn(SIZE))
        self.register_buffer("kept", torch.randn(SIZE))
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.last(self.work(self, self.first(x.sin())) + self.other.cos())


class Nets(nn.ModuleList):
    """Several next to one another, compiled in one graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([net(x) for net in self])


def in_place_later(net: Net, h: Tensor) -> Tensor:
    h = h * 1.0
    h[torch.tensor([1, 3])] = 1.0
    return torch.tanh(h + net.watched)


def saved(net: Net, h: Tensor, copied: bool = False) -> Tensor:
    return h * Saved.apply(net.watched, net.kept, copied)  # type: ignore[no-untyped-call, no-any-return]


PROGRAMS: dict[str, tuple[Callable[[Net, Tensor], Tensor], int]] = {
    "a gradient of its own": (lambda net, h: h * net.watched, TAKEN),
    "read by the code that follows": (lambda net, h: h + net.watched, COPIED),
    "written by the code that follows": (in_place_later, COPIED),
    "a view of what is read": (lambda net, h: h + net.watched.view(16, 8).view(SIZE), COPIED),
    "an input": (saved, COPIED),
    "a copy of an input, which Inductor removes": (lambda net, h: saved(net, h, copied=True), COPIED),
}


def nets_of(*names: str) -> Nets:
    torch.manual_seed(0)
    return Nets([Net(PROGRAMS[name][0]) for name in names])


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """How the gradient of each parameter came, by the parameter's ``id``, and where it was."""
    found: dict[int, tuple[int, int]] = {}
    receive = Call.receive

    def noted(call: Call, slot: int, gradient: Tensor, treatment: int, gate: Any) -> None:
        found[id(call._parameters[slot])] = treatment, gradient.data_ptr()
        receive(call, slot, gradient, treatment, gate)

    monkeypatch.setattr(Call, "receive", noted)
    return found


def assert_trained_as_eager(names: tuple[str, ...], hook: Any = None) -> Nets:
    nets, eager = nets_of(*names), nets_of(*names)
    ddp = DistributedDataParallel(nets, bucket_cap_mb=16 * 8 * 4 / 2**20)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    found = gradients(nets, ddpopt.compile(ddp, strategy="inline"), drawn(*SIZE))
    torch.testing.assert_close(found, gradients(eager, eager, drawn(*SIZE)))
    return nets


@pytest.mark.nightly
def test_memory_is_used_directly_where_code_is_done_with_it(received: dict[int, tuple[int, int]]) -> None:
    nets = assert_trained_as_eager(tuple(PROGRAMS))
    for net, (name, (_, expected)) in zip(nets, PROGRAMS.items(), strict=True):
        treatment, address = received[id(net.watched)]
        assert (name, treatment) == (name, expected)
        assert (net.watched.grad.data_ptr() == address) == (expected == TAKEN), name  # type: ignore[union-attr, operator]  # it is there


def sending(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return completed(bucket.buffer())


@pytest.mark.parametrize("with_hook", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_parameter_that_is_read_later_waits_only_where_it_may_change(
    with_hook: bool, received: dict[int, tuple[int, int]], monkeypatch: Any
) -> None:
    monkeypatch.setattr("ddpopt.inline.lowering._is_read_after", lambda *_: True)
    handed, hand_over = list[Tensor](), ReadyHooks.hand_over

    def noted(hooks: ReadyHooks, place: int, parameter: Tensor, *others: Any) -> None:
        handed.append(parameter)
        hand_over(hooks, place, parameter, *others)

    monkeypatch.setattr(ReadyHooks, "hand_over", noted)
    with fresh_cache():
        (net,) = assert_trained_as_eager(("a gradient of its own",), sending if with_hook else None)
    assert received[id(net.watched)][0] == LATE
    assert any(parameter is net.watched for parameter in handed) != with_hook


# reads a parameter by arithmetic that Inductor would put off until what follows has need of it
REORDERED = DrawnModel((step("linear"), step("reordered", by="sort"), step("linear")), width=16)


def test_an_optimizer_in_the_communication_hook_changes_no_gradient_of_its_step() -> None:
    def stepping(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            parameter.data.add_(gradient, alpha=-100.0)
        return completed(bucket.buffer())

    trained = []
    for compiled in (False, True):
        ddp = DistributedDataParallel(REORDERED.program.model(), bucket_cap_mb=1e-6)
        ddp.register_comm_hook(None, stepping)
        call = ddpopt.compile(ddp, strategy="inline") if compiled else ddp
        trained.append(gradients(ddp.module, call, drawn(*SIZE)))
    torch.testing.assert_close(*trained)


def test_a_backend_that_calls_inductor_keeps_its_overlap() -> None:
    case = resolve("weight_norm")
    found = []
    for backend in ("inductor", calling_inductor):
        ddp = DistributedDataParallel(case.model(), bucket_cap_mb=0.3)
        step = ddpopt.compile(ddp, backend=backend, strategy="inline")
        found.append(measure(ddp, lambda number, step=step: case.step(step, 0, number)))  # type: ignore[misc]
    assert found[0].potential > 0.3
    assert found[1] == found[0]


# ------------------------------------------------------------------------------ several steps of training


class Layers(nn.Module):
    """Two layers; and rows of a table, read last: in the backward their gradient is made first."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x * self.table(torch.tensor([0, 1, 1, 2]))  # type: ignore[no-any-return]  # of torch


@pytest.mark.parametrize(
    "sparse",
    [pytest.param(True, marks=pytest.mark.nightly), False],
    ids=["sparse", "views of buckets"],
)
def test_gradients_that_go_together_accumulate_and_are_reduced_as_eagers(sparse: bool) -> None:
    options: Any = {"bucket_cap_mb": 8 * 9 * 4 / 2**20, "gradient_as_bucket_view": not sparse}
    compiled_ddp, eager = (DistributedDataParallel(Layers(sparse), **options) for _ in range(2))
    compiled = ddpopt.compile(compiled_ddp, strategy="inline")
    for number in range(4):
        found = []
        for call, ddp in ((compiled, compiled_ddp), (eager, eager)):
            with ddp.no_sync() if number % 2 == 0 else nullcontext():
                found.append(gradients(ddp, call, drawn(4, 8, seed=number)))
        torch.testing.assert_close(*found)
        assert compiled_ddp.module.table.weight.grad.is_sparse == sparse


class Weighted(nn.Module):
    """Multiplies its first weight by a tensor, which the backward reads after the last layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        h = x @ self.first
        for layer in self.layers:
            h = layer(h).tanh()
        return h.sum() + (self.first.sin() * weight).sum()


@pytest.mark.parametrize("read", ["flat buffer", "view of a bucket"])
def test_compiled_code_that_reads_gradients_reads_those_of_before_the_backward(read: str) -> None:
    found: list[list[Tensor]] = [[], []]
    for compiled in (False, True):
        as_view = read == "view of a bucket"
        ddp = DistributedDataParallel(Weighted(), bucket_cap_mb=0.0002, gradient_as_bucket_view=as_view)
        model = ddpopt.compile(ddp, strategy="inline") if compiled else ddp
        last = ddp.module.layers[2].weight
        flat = torch.zeros(2, 8, 8)
        if not as_view:
            last.grad = flat[0]
        weight = torch.ones(8, 8)
        for number in range(3):
            model(drawn(4, 8, seed=number), weight if as_view else flat.select(0, 0)).backward()
            found[compiled] += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
            assert last.grad is not None
            weight = last.grad
            if as_view:
                ddp.zero_grad()
    torch.testing.assert_close(*found)


# ------------------------------------------------------------------------------------------------- caches


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """What Inductor's caches and AOTAutograd's gave within the block."""
    counters.clear()
    found: dict[str, int] = {}
    yield found
    found["graphs compiled"] = counters["inductor"]["fxgraph_cache_miss"]
    found["traces found"] = counters["aot_autograd"]["autograd_cache_hit"]
    found["traces made"] = counters["aot_autograd"]["autograd_cache_miss"]
    found["not cached"] = counters["aot_autograd"]["autograd_cache_bypass"]


def started(model: nn.Module, x: Tensor, compile_: Callable[[DistributedDataParallel], Any]) -> list[Tensor]:
    """One step of a process that has compiled nothing yet, as far as Dynamo knows."""
    torch._dynamo.reset()
    model.zero_grad()
    ddp = DistributedDataParallel(model, bucket_cap_mb=CAP_MB)
    with torch._dynamo.config.patch(optimize_ddp=False):
        return gradients(model, compile_(ddp), x)


def inlined(ddp: DistributedDataParallel) -> Any:
    return ddpopt.compile(ddp, strategy="inline")


def test_a_second_start_compiles_nothing_and_gets_no_plain_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Layers(), drawn(4, 8)
    with fresh_cache():
        with counted() as cold:
            first = started(model, x, inlined)
        with counted() as other:
            whole = started(model, x, torch.compile)
        with counted() as warm:
            second = started(model, x, inlined)
        monkeypatch.setattr(inductor, "_traced_code", lambda: "of another release")
        with counted() as changed:
            started(model, x, inlined)
    assert (cold["traces made"], cold["traces found"], cold["not cached"]) == (1, 0, 0)
    assert warm == {"graphs compiled": 0, "traces found": 1, "traces made": 0, "not cached": 0}
    assert changed["traces made"] == other["traces made"] == 1
    assert len(first) == 5
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, whole))


class Views(nn.Module):
    """A segment gives the next one two views of what a matrix product without bias returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        one, other = made.flatten(1), made.flatten(1)[:, 1:]
        return torch.cat([self.second(x).flatten(1) * one, other.sin()], 1)


def test_views_that_leave_a_segment_come_back_whole_from_the_caches() -> None:
    """Up to 2.13 torch writes garbage for their sizes, or crashes (pytorch#185630)."""
    model, x = Views(), drawn(2, 3, 8)
    eager = [gradient.clone() for gradient in gradients(model, model, x)]
    with fresh_cache():
        for _ in range(2):
            found = started(model, x, lambda ddp: ddpopt.compile(ddp, strategy="split"))
            torch.testing.assert_close(found, eager)
