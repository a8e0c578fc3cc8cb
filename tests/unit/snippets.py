"""Small forwards, one for each thing that may cross a cut or span it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


class Model(nn.Module):
    """Three 4 x 4 layers, a norm, a cell and a buffer; the forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.cell = nn.LSTMCell(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.inner = forward

    def forward(self, *args: Any) -> Any:
        return self.inner(self, *args)


def residual(m: Model, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = x + layer(x).tanh()
    return x


def chunks(m: Model, x: Tensor) -> Tensor:
    first, second = m.layers[0](x).chunk(2, -1)
    y = m.layers[1](torch.cat([second, first], -1))
    out: Tensor = y * torch.cat([first, second], -1)
    return out


def named_tuple(m: Model, x: Tensor) -> Any:
    values, places = m.layers[0](x).max(dim=-1)
    return m.layers[1](x) * values[:, None], places


def recurrence(m: Model, x: Tensor) -> Any:
    hidden = cell = x
    for _ in range(2):
        hidden, cell = m.cell(x, (hidden, cell))
    return hidden, cell


def sizes(m: Model, x: Tensor) -> Tensor:
    rows, width = x.shape
    y = m.layers[0](x).view(rows, 2, width // 2).transpose(1, 2).reshape(rows, width)
    out: Tensor = m.layers[1](y) * rows
    return out


def nested_autocast(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            y = m.layers[1](y.float())
        z: Tensor = m.layers[2](y)
    return z.float()


def grad_mode_spans(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.layers[1](x).abs().max()
        twice = scale * 2
    y = m.layers[0](x)
    with torch.no_grad():
        with torch.enable_grad():
            z = m.layers[2](y)
        total = z.sum()
    out: Tensor = m.layers[1](z) / scale + twice * total
    return out


def random_numbers(m: Model, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = F.dropout(layer(x), 0.5)
    return x + torch.rand_like(x)


def in_place(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x)
    y += 1
    z = m.layers[1](y.relu())
    z.mul_(2)
    z[0] = 3
    out: Tensor = m.layers[2](z)
    return out


def mutated_views(m: Model, x: Tensor) -> Any:
    y = m.layers[0](x) * 1
    flat = y.view(-1)
    row = y[0]
    flat.mul_(2)
    total = row.sum() + y.sum()
    row.add_(1)
    return m.layers[1](y) + total, flat


def views_without_grad(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x).tanh()
    with torch.no_grad():
        same = y.flatten(1)  # y itself: gradient passes
        turned = y.t()
        weight = m.layers.get_parameter("2.weight").t()
        first, second = y.chunk(2, -1)
    row = turned[0]
    z = m.layers[1](same) * row.sum()
    out: Tensor = z @ weight + torch.cat([second, first], -1) + y
    return out


def inputs_that_no_grad_returns(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x).tanh()
    with torch.no_grad():
        same, other = torch.atleast_2d(y, x)  # type: ignore[no-untyped-call]  # of torch
        wide, high = torch.broadcast_tensors(y, m.get_parameter("layers.2.bias"))  # type: ignore[no-untyped-call]
        row = high[0]
    z = m.layers[1](same * other)
    out: Tensor = m.layers[2](z) + wide * row + same
    return out


def written_without_grad(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x) * 1
    with torch.no_grad():
        doubled = y.mul_(2)
        more = doubled.add_(1)
    z = m.layers[1](more)
    out: Tensor = m.layers[2](z)
    return out


def outputs_without_grad(m: Model, x: Tensor) -> Any:
    y = m.layers[0](x).tanh()
    with torch.no_grad():
        turned, parts = y.t(), y.chunk(2, -1)
    z = m.layers[1](y)
    return m.layers[2](z), turned, parts, turned[0]


def mutated_views_without_grad(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x) * 1
    row = y[0]
    with torch.no_grad():
        flat = y.view(-1)
        z = m.layers[1](x)
        y.mul_(2)
        peek = row.sum() * flat.sum()
    out: Tensor = m.layers[2](z) + row * peek + y
    return out


def buffers(m: Model, x: Tensor) -> Tensor:
    y = m.norm(m.layers[0](x))
    mean = m.get_buffer("mean")
    mean.lerp_(y.detach().mean(0), 0.1)
    out: Tensor = m.layers[1](y) + mean
    return out


def mutated_input(m: Model, x: Tensor, extra: Tensor) -> Tensor:
    y = m.layers[0](x)
    extra.add_(1)
    z: Tensor = m.layers[1](y + extra)
    extra.mul_(2)
    return z * extra


def outputs_of_all_kinds(m: Model, x: Tensor) -> Any:
    y = m.layers[0](x)
    z = m.layers[1](y)
    return {"first": y, "rest": (y, z, 3, None), "input": x, "parameter": m.layers[2].weight}


def constants(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    out: Tensor = m.layers[1](y) + torch.ones(4)
    return out


def branches(m: Model, x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, m.layers[0], m.layers[1], (x,))
    out: Tensor = m.layers[2](y)
    return out


def checkpoints(m: Model, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = checkpoint(layer, x.tanh(), use_reentrant=False)
    return x


def complex_numbers(m: Model, x: Tensor) -> Tensor:
    y = torch.view_as_complex(m.layers[0](x).view(-1, 2, 2))
    z = torch.fft.fft(y)
    out: Tensor = m.layers[1](torch.view_as_real(z * y.conj()).flatten(1))
    return out


def integers(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x)
    order = y.argsort(-1)
    out: Tensor = m.layers[1](y).gather(-1, order)
    return out


def scalar(m: Model, x: Tensor, scale: float) -> Tensor:
    y = m.layers[0](x) * scale
    out: Tensor = m.layers[1](y) * (scale + 1) + m.layers[2](y) * scale
    return out


def item(m: Model, x: Tensor) -> Tensor:
    count = (x > 0).sum().item()
    y = m.layers[0](x) * count
    out: Tensor = m.layers[1](y) + count
    return out


def data_dependent_size(m: Model, x: Tensor) -> Any:
    rows = (x[:, 0] > 0).nonzero().squeeze(-1)
    y = m.layers[0](x[rows])
    return m.layers[1](y), y.shape[0]


@dataclass(frozen=True)
class Snippet:
    """A forward, its inputs, and how it has to be compiled.

    Attributes:
        forward: takes a `Model` and the inputs.
        extra: inputs after a 3 x 4 matrix.
        dynamic: as for ``torch.compile``.
    """

    forward: Forward
    extra: tuple[Any, ...] = ()
    dynamic: bool = False

    def model(self) -> Model:
        torch.manual_seed(1)
        return Model(self.forward).train()

    def inputs(self) -> tuple[Any, ...]:
        torch.manual_seed(2)
        return torch.randn(3, 4), *map(copied, self.extra)


STATIC = (
    residual, chunks, named_tuple, recurrence, sizes, nested_autocast, grad_mode_spans, random_numbers,
    in_place, mutated_views, views_without_grad, mutated_views_without_grad, inputs_that_no_grad_returns,
    written_without_grad, outputs_without_grad, buffers, outputs_of_all_kinds, constants, branches,
    checkpoints, complex_numbers, integers, data_dependent_size, item,
)  # fmt: skip
SNIPPETS: Mapping[str, Snippet] = {
    **{forward.__name__: Snippet(forward) for forward in STATIC},
    "mutated_input": Snippet(mutated_input, (torch.ones(3, 4),)),
    "dynamic_sizes": Snippet(sizes, dynamic=True),
    "dynamic_int": Snippet(scalar, (3,), dynamic=True),
    "dynamic_float": Snippet(scalar, (0.5,), dynamic=True),
}
"""Every snippet by its name."""


def copied(value: Any) -> Any:
    """A leaf of its own with the same value; a symbolic number as the number that it stands for."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return int(value) if isinstance(value, torch.SymInt) else value
