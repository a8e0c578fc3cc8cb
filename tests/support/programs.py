"""Programs of public reports: a model and a step around it, which each mode must train as eager DDP does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 600
"""A layer then fills the first bucket of torch's own optimizer, of 1 MiB."""
Step = Callable[[Any, Tensor], Any]


class Layers(nn.Module):
    """Three layers, between which a program does something."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))

    def middle(self, x: Tensor) -> Any:
        """What lies between the first and the last layer."""
        return self.between(x)


class CompiledInCheckpoint(Layers):
    def middle(self, x: Tensor) -> Any:
        inner = torch.compile(self.between, backend="aot_eager")
        return checkpoint(lambda x: inner(x).sin(), x, use_reentrant=False)


class Normed(Layers):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)
        parametrizations.spectral_norm(self.between)


class SizesAndLists(Layers):
    def forward(self, x: Tensor) -> Any:
        parts = [self.first(x), self.between(x)]
        rows, columns = parts[0].shape
        scaled = [part / (rows * columns) for part in parts]
        return self.last(torch.stack(scaled).sum(0)) * rows


class OnlyWrites(Layers):
    def middle(self, x: Tensor) -> Any:
        seen: Any = self.seen
        y = self.between(x)
        with torch.no_grad():
            seen.add_(x.mean(0))
            seen.mul_(0.5)
        return y + x


class Drawing(Layers):
    def middle(self, x: Tensor) -> Any:
        return nn.functional.dropout(self.between(x), 0.5)


class Transformed(Layers):
    def middle(self, x: Tensor) -> Any:
        def energy(row: Tensor) -> Any:
            return self.between(row).square().sum()

        return torch.func.vmap(torch.func.grad(energy))(x)


class Collective(Layers):
    def middle(self, x: Tensor) -> Any:
        total = x.detach().mean(0)
        dist.all_reduce(total)
        return self.between(x) + total


class Packed(Layers):
    """Sequences of different lengths, one after the other in one tensor."""

    def middle(self, x: Tensor) -> Any:
        lengths = [2, x.shape[0] - 2]
        return torch.cat([part - part.mean(0) for part in self.between(x).split(lengths)])


def plain(model: Any, x: Tensor) -> None:
    model(x).square().sum().backward()


def within_autocast(model: Any, x: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().square().sum().backward()


def twice(model: Any, x: Tensor) -> None:
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def with_a_penalty(model: Any, x: Tensor) -> None:
    x = x.requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.square().sum() + slope.square().sum()).backward()


def captured(model: Any, x: Tensor) -> None:
    loss = model(x).square().sum()
    if not hasattr(model, "_orig_mod"):
        loss.backward()
        return
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def explained(model: Any, x: Tensor) -> None:
    if hasattr(model, "_orig_mod"):
        torch._dynamo.explain(model)(x)
        model.zero_grad()
    plain(model, x)


def checking(gm: Any, inputs: Sequence[Any]) -> Any:
    """A backend that accepts only what a compiler of tensors does."""
    wrong = [type(each) for each in inputs if not isinstance(each, (Tensor, int, torch.SymInt))]
    assert not wrong, f"a piece is given {wrong}"
    return aot_eager(gm, [*inputs])


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        model: makes the model.
        step: a forward and a backward.
        rows: by rank and step, the number of rows of the batch.
        steps: how many.
        backend: under which it is compiled.
        ddp: arguments of DDP.
        as_step: whether a whole step can be captured.
    """

    model: Callable[[], nn.Module] = Layers
    step: Step = plain
    rows: Callable[[int, int], int] = lambda _, __: 6
    steps: int = 3
    backend: Any = "aot_eager"
    ddp: dict[str, Any] = field(default_factory=dict)
    as_step: bool = True


PROGRAMS = {
    "compiled_in_checkpoint": Program(CompiledInCheckpoint),
    "normed": Program(Normed),
    "sizes_and_lists": Program(SizesAndLists, backend=checking, rows=lambda _, step: 4 + step),
    "only_writes": Program(OnlyWrites),
    "explained": Program(step=explained, as_step=False),
    "within_autocast": Program(step=within_autocast),
    "captured": Program(step=captured, as_step=False),
    "drawn_twice": Program(Drawing, twice),
    "penalty": Program(step=with_a_penalty),
    "transformed": Program(Transformed),
    "collective": Program(Collective, as_step=False),
    "packed": Program(Packed, rows=lambda rank, step: 4 + rank + step),
    "one_rank_compiles": Program(rows=lambda rank, step: 6 + rank * (step > 0)),
    "twenty_steps": Program(steps=20),
}
