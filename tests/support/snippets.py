"""What may cross a cut or span it: every block of drawn models, and forwards of what these have not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddpopt.testing.drawn import BLOCKS, Block, DrawnModel, Step, step

Forward = Callable[..., Any]


class Model(nn.Module):
    """Three 4 x 4 layers; the forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.inner = forward

    def forward(self, *args: Any) -> Any:
        return self.inner(self, *args)


def named_tuple(m: Model, x: Tensor) -> Any:
    values, places = m.layers[0](x).max(dim=-1)
    return m.layers[1](x) * values[:, None], places


def nested_autocast(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            y = m.layers[1](y.float())
        z: Tensor = m.layers[2](y)
    return z.float()


def grad_mode_spans(m: Model, x: Tensor) -> Any:
    with torch.no_grad():
        scale = m.layers[1](x).abs().max()
        twice = scale * 2
    y = m.layers[0](x)
    with torch.no_grad():
        with torch.enable_grad():
            z = m.layers[2](y)
        total = z.sum()
    return m.layers[1](z) / scale + twice * total


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


def inputs_that_no_grad_returns(m: Model, x: Tensor) -> Any:
    y = m.layers[0](x).tanh()
    with torch.no_grad():
        same, other = torch.atleast_2d(y, x)  # type: ignore[no-untyped-call]  # of torch
        wide, high = torch.broadcast_tensors(y, m.get_parameter("layers.2.bias"))  # type: ignore[no-untyped-call]
        row = high[0]
    z = m.layers[1](same * other)
    return m.layers[2](z) + wide * row + same


def outputs_without_grad(m: Model, x: Tensor) -> Any:
    y = m.layers[0](x).tanh()
    with torch.no_grad():
        turned, parts = y.t(), y.chunk(2, -1)
    z = m.layers[1](y)
    return m.layers[2](z), turned, parts, turned[0]


def branches(m: Model, x: Tensor) -> Any:
    y = torch.cond(x.sum() > 0, m.layers[0], m.layers[1], (x,))
    return m.layers[2](y)


def scalar(m: Model, x: Tensor, scale: float) -> Any:
    y = m.layers[0](x) * scale
    return m.layers[1](y) * (scale + 1) + m.layers[2](y) * scale


def data_dependent_size(m: Model, x: Tensor) -> Any:
    rows = (x[:, 0] > 0).nonzero().squeeze(-1)
    y = m.layers[0](x[rows])
    return m.layers[2](m.layers[1](y)), y.shape[0]


def reshaped_in_place(m: Model, x: Tensor) -> Any:
    y = m.layers[0](x) * 1
    view = y.view(4, 3)
    view.t_()
    return m.layers[2](m.layers[1](view).tanh())


def early_readers_without_gradient(m: Model, x: Tensor) -> Any:
    last: Tensor = m.layers.get_parameter("2.weight")
    seen, place = last.detach().sum(), last.argmax()
    with torch.no_grad():
        total = last.sum()
    last.sum()
    last.sin().add_(1)
    return m.layers[2](m.layers[1](m.layers[0](x))) * seen * place * total


def written_twice(m: Model, x: Tensor, count: Tensor) -> Any:
    y = m.layers[0](x)
    count.add_(1)
    row = count[0]
    count.add_(1)
    y = m.layers[1](y) + row
    return m.layers[2](y) + row


class Reversed(torch.autograd.Function):
    """A view whose gradient is turned round, as in domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


def gradient_turned_round(m: Model, x: Tensor) -> Tensor:
    y = m.layers[0](x).tanh()
    turned = Reversed.apply(y)  # type: ignore[no-untyped-call]  # of torch
    out: Tensor = m.layers[2](m.layers[1](y)) + turned
    return out


def doubled_size(m: Model, x: Tensor) -> Any:
    y = m.layers[0](torch.cat([x, x]))
    return m.layers[2](m.layers[1](y))


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


OWN = (
    named_tuple, nested_autocast, grad_mode_spans, views_without_grad, inputs_that_no_grad_returns,
    outputs_without_grad, branches, data_dependent_size, reshaped_in_place, early_readers_without_gradient,
    gradient_turned_round,
)  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A drawn model in the place of a snippet."""

    steps: tuple[Step, ...]
    dynamic: bool = False

    def model(self) -> nn.Module:
        return DrawnModel(self.steps).program.model()

    def inputs(self) -> tuple[Any, ...]:
        return DrawnModel(self.steps).program.inputs()[0]


def _alone(name: str, block: Block) -> Step:
    return step(name, body=(step("linear"),)) if block.body else step(name)


APART = {"select", "kept_and_written", *(name for name, block in BLOCKS.items() if block.breaks)}
"""Steps that compile by themselves or end the graph, and one whose graph cannot be trained uncompiled."""
BLOCK_STEPS = [_alone(n, b) for n, b in BLOCKS.items() if b.place == "step" and n not in APART]
MODELS = 9
"""As many have all blocks between them."""
SNIPPETS: Mapping[str, Snippet | Drawn] = {
    **{forward.__name__: Snippet(forward) for forward in OWN},
    **{f"blocks_{i}": Drawn(tuple(BLOCK_STEPS[i::MODELS])) for i in range(MODELS)},
    "blocks_of_any_batch": Drawn((step("linear"), step("size"), step("wide")), dynamic=True),
    "written_twice": Snippet(written_twice, (torch.zeros(4),)),
    "doubled_size": Snippet(doubled_size, dynamic=True),
    "dynamic_float": Snippet(scalar, (0.5,), dynamic=True),
}
"""Every snippet by its name."""


def copied(value: Any) -> Any:
    """A leaf of its own with the same value; a symbolic number as the number that it stands for."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return int(value.node.hint) if isinstance(value, torch.SymInt) else value  # to ask it would fix it
