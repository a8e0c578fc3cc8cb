"""DDP gets the memory of a gradient that generated code is done with, and no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.inline.handover import COPIED, LATE, TAKEN, Call

pytestmark = pytest.mark.usefixtures("one_rank_group", "fresh_dynamo")

SIZE = (8, 16)


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
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.watched = nn.Parameter(torch.randn(SIZE))
        self.other = nn.Parameter(torch.randn(SIZE))
        self.register_buffer("kept", torch.randn(SIZE))
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.work(self, self.first(x.sin())) + self.other.cos())
        return out


def in_place_later(net: Net, h: Tensor) -> Tensor:
    h = h * 1.0
    h[torch.tensor([1, 3])] = 1.0
    return torch.tanh(h + net.watched)


def saved(net: Net, h: Tensor) -> Tensor:
    return h * Saved.apply(net.watched, net.kept, False)  # type: ignore[no-untyped-call, no-any-return]


def saved_and_copied(net: Net, h: Tensor) -> Tensor:
    return h * Saved.apply(net.watched, net.kept, True)  # type: ignore[no-untyped-call, no-any-return]


PROGRAMS: dict[str, tuple[Callable[[Net, Tensor], Tensor], int]] = {
    "a gradient of its own": (lambda net, h: h * net.watched, TAKEN),
    "read by the code that follows": (lambda net, h: h + net.watched, COPIED),
    "written by the code that follows": (in_place_later, COPIED),
    "a view of what is read": (lambda net, h: h + net.watched.view(16, 8).view(SIZE), COPIED),
    "an input": (saved, COPIED),
    "a copy of an input, which Inductor removes": (saved_and_copied, COPIED),
}


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


def gradients(module: nn.Module, call: Any) -> list[Tensor]:
    x = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    call(x).square().mean().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_is_taken_only_where_generated_code_is_done_with_it(
    name: str, received: dict[int, tuple[int, int]]
) -> None:
    work, expected = PROGRAMS[name]
    net, eager = Net(work), Net(work)
    ddp = DistributedDataParallel(net, bucket_cap_mb=16 * 8 * 4 / 2**20)
    found = gradients(net, ddpopt.compile(ddp, strategy="inline"))
    treatment, address = received[id(net.watched)]
    assert treatment == expected
    assert net.watched.grad is not None
    assert (net.watched.grad.data_ptr() == address) == (expected == TAKEN)
    for a, b in zip(found, gradients(eager, eager), strict=True):
        torch.testing.assert_close(a, b)


class Sum(nn.Module):
    """A parameter and an input of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.added, self.last = nn.Parameter(torch.randn(SIZE)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x + self.added)
        return out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_gradient_that_the_code_also_returns_has_memory_of_its_own(backend: str) -> None:
    model = Sum()
    ddp = DistributedDataParallel(model, bucket_cap_mb=16 * 8 * 4 / 2**20)
    x = torch.ones(SIZE, requires_grad=True)
    torch.autograd.backward(ddpopt.compile(ddp, backend=backend, strategy="inline")(x).square().mean())
    assert x.grad is not None
    assert model.added.grad is not None
    assert torch.equal(x.grad, model.added.grad)
    assert x.grad.data_ptr() != model.added.grad.data_ptr()


class Scaled(nn.Module):
    """Reads a parameter by arithmetic that Inductor would put off until what follows has need of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((self.first(x).roll(1, 0) * self.scale).sort(1)[0])
        return out


def test_an_optimizer_in_the_communication_hook_changes_no_gradient_of_its_step() -> None:
    def stepping(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            parameter.data.add_(gradient, alpha=-100.0)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    trained = []
    for compiled in (False, True):
        model = Scaled()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1e-6)
        ddp.register_comm_hook(None, stepping)
        trained.append(gradients(model, ddpopt.compile(ddp, strategy="inline") if compiled else ddp))
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b)


def test_a_late_gradient_takes_the_usual_way(received: dict[int, tuple[int, int]], monkeypatch: Any) -> None:
    monkeypatch.setattr("ddpopt.inline.lowering._is_read_after", lambda *_: True)
    net, eager = (Net(PROGRAMS["a gradient of its own"][0]) for _ in range(2))
    ddp = DistributedDataParallel(net, bucket_cap_mb=16 * 8 * 4 / 2**20)
    with torch._inductor.utils.fresh_cache():
        found = gradients(net, ddpopt.compile(ddp, strategy="inline"))
    assert received[id(net.watched)][0] == LATE
    for a, b in zip(found, gradients(eager, eager), strict=True):
        torch.testing.assert_close(a, b)
