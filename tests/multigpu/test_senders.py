"""Others that send in the same backward, and what one rank alone may decide.

All tensors that are sent have one size, so two collectives that are paired wrongly add up without an error.
Every sender is tried with every decision: gradients must be eager DDP's, bit for bit.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ranks.group import Ranks
from tests.support.models import completed

WIDTH = 16
STEPS = 3
A_WEIGHT_MB = 4 * WIDTH**2 / 2**20


class Chain(nn.Module):
    """Layers without biases, and a weight in the middle that DDP may ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.apart = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 2:
                x = torch.tanh(x @ self.apart)
        return x


def averaged(gradient: Tensor) -> Tensor:
    """What a user's hook makes of a gradient that DDP does not reduce."""
    mean = gradient.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def wrapped(model: nn.Module, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=A_WEIGHT_MB, **arguments)


class Program:
    """A model, and a step with a second sender; subclasses differ in who that is."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model: Any = Chain()
        self.prepare()
        self.ddp = wrapped(self.model)
        self.call: Callable[[Tensor], Tensor] = self.ddp

    def prepare(self) -> None:
        """Before the model is wrapped."""

    def compile(self, strategy: Any) -> None:
        self.call = ddpopt.compile(self.ddp, backend="aot_eager", strategy=strategy)

    def loss(self, x: Tensor) -> Tensor:
        return self.call(x).square().mean()

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.model.parameters()]

    def zero_grad(self) -> None:
        self.model.zero_grad()


class HookOnIgnored(Program):
    """A weight that DDP ignores, whose gradient a hook averages."""

    def prepare(self) -> None:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ["apart"])  # type: ignore[no-untyped-call]  # of torch
        self.model.apart.register_hook(averaged)


class HookAfterAccumulation(Program):
    """The same, after the gradient was accumulated."""

    def prepare(self) -> None:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ["apart"])  # type: ignore[no-untyped-call]  # of torch

        def average(parameter: Any) -> None:
            parameter.grad = averaged(parameter.grad)

        self.model.apart.register_post_accumulate_grad_hook(average)


class HookOnReduced(Program):
    """A hook that averages the gradient of one of DDP's own parameters first."""

    def prepare(self) -> None:
        self.model.apart.register_hook(averaged)


class HookOnInput(Program):
    """A prompt outside the model, an input of it, whose gradient a hook averages."""

    def prepare(self) -> None:
        self.prompt = torch.randn(8, WIDTH, requires_grad=True)
        self.prompt.register_hook(averaged)  # type: ignore[no-untyped-call]  # of torch

    def loss(self, x: Tensor) -> Tensor:
        return self.call(x).square().mean() + self.call(self.prompt).mean()

    def gradients(self) -> list[Tensor | None]:
        return [*super().gradients(), self.prompt.grad]

    def zero_grad(self) -> None:
        super().zero_grad()
        self.prompt.grad = None


class Several(Program):
    """A second DDP module in the same backward."""

    def prepare(self) -> None:
        self.other: Any = wrapped(Chain())
        self.call_other: Callable[[Tensor], Tensor] = self.other

    def compile(self, strategy: Any) -> None:
        super().compile(strategy)
        self.call_other = ddpopt.compile(self.other, backend="aot_eager", strategy=strategy)

    def gradients(self) -> list[Tensor | None]:
        return [*super().gradients(), *(p.grad for p in self.other.parameters())]

    def zero_grad(self) -> None:
        super().zero_grad()
        self.other.zero_grad()


class SideBySide(Several):
    def loss(self, x: Tensor) -> Tensor:
        return self.call(x).square().mean() + self.call_other(x).square().mean()


class InARow(Several):
    def loss(self, x: Tensor) -> Tensor:
        return self.call(self.call_other(x)).square().mean()


class EagerOther(SideBySide):
    """The second module is not compiled."""

    def compile(self, strategy: Any) -> None:
        Program.compile(self, strategy)


class InnerWithHook(Program):
    """A DDP module inside the model, with a communication hook."""

    def prepare(self) -> None:
        inner = wrapped(nn.Linear(WIDTH, WIDTH, bias=False))

        def average(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            return completed(averaged(bucket.buffer()))

        inner.register_comm_hook(None, average)
        self.model.layers[3] = inner
        names = [f"layers.3.{name}" for name, _ in inner.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, names)  # type: ignore[no-untyped-call]  # of torch


SENDERS = (
    HookOnIgnored, HookAfterAccumulation, HookOnReduced, HookOnInput, SideBySide, InARow, EagerOther,
    InnerWithHook,
)  # fmt: skip

BY_DAY = (HookOnIgnored, HookOnReduced, InnerWithHook)
SENDERS_IN_TURN = [
    pytest.param(each, marks=() if each in BY_DAY else pytest.mark.nightly) for each in SENDERS
]
Run = Callable[[Program, Tensor], None]


def plain(program: Program, x: Tensor) -> None:
    program.loss(x).backward()  # type: ignore[no-untyped-call]  # of torch


def under_anomaly_mode(program: Program, x: Tensor) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        plain(program, x)


def with_a_penalty(program: Program, x: Tensor) -> None:
    total = program.loss(x) + program.model.layers[1].weight.square().sum()
    total.backward()


def with_an_input_that_needs_a_gradient(program: Program, x: Tensor) -> None:
    plain(program, x.clone().requires_grad_())


def with_a_hook_that_looks_on(program: Program, x: Tensor) -> None:
    handle = program.model.layers[4].weight.register_hook(lambda gradient: None)
    try:
        plain(program, x)
    finally:
        handle.remove()


def with_two_forwards(program: Program, x: Tensor) -> None:
    (program.loss(x) + program.loss(-x)).backward()  # type: ignore[no-untyped-call]  # of torch


DECISIONS: dict[str, tuple[Run, bool]] = {
    "none": (plain, False),
    "anomaly mode": (under_anomaly_mode, False),
    "penalty": (with_a_penalty, False),
    "input": (with_an_input_that_needs_a_gradient, False),
    "hook": (with_a_hook_that_looks_on, False),
    "two forwards": (with_two_forwards, True),
}
"""How one rank runs the step, and whether all must: in eager, too, ranks must take as many forwards."""


def trained(sender: type[Program], run: Run, ranks: Ranks, *, on_all: bool, strategy: str) -> list[Tensor]:
    """The gradients of some steps."""
    program, gradients = sender(), list[Tensor]()
    if strategy != "eager":
        program.compile(strategy)
    for step in range(STEPS):
        program.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + ranks.rank))
        (run if on_all or ranks.rank == 1 else plain)(program, x)
        gradients += [g.clone() for g in program.gradients() if g is not None]
    return gradients


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["inline", pytest.param("split", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sender", SENDERS_IN_TURN, ids=lambda sender: sender.__name__)
def test_another_sender_meets_the_same_collectives_whatever_one_rank_decides(
    sender: type[Program], strategy: str, ranks: Ranks
) -> None:
    failed = []
    for name, (run, on_all) in DECISIONS.items():
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of anomaly mode
            expected = trained(sender, run, ranks, on_all=on_all, strategy="eager")
            got = trained(sender, run, ranks, on_all=on_all, strategy=strategy)
        alike = len(got) == len(expected) and all(map(torch.equal, got, expected))
        failed += [] if alike else [name]
    assert ranks.gather(failed) == [[] for _ in range(ranks.size)]
