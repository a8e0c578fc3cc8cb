"""Values that cross cuts in unusual states: mutated, aliased, transposed, random, or not tensors at all."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddpopt.cases.corpus.draws import arrays, rows_case
from ddpopt.cases.corpus.layers import Layers


class InPlace(Layers):
    """A stream of activations that every layer updates in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape, without changing the input."""
        stream = x.clone()
        for layer in self.layers:
            stream.add_(layer(stream.clone()).relu_()).mul_(0.9)
        return stream


class ViewsInPlace(nn.Module):
    """Two views of one tensor are updated in place across layers, then the tensor itself is read."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(2 * dim, 2 * dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 2 * dim)`` to the same shape."""
        both = self.first(x)
        half = both.shape[1] // 2
        left = both[:, :half]
        right = both[:, half:]
        for index, layer in enumerate(self.layers):
            source, target = (left, right) if index % 2 == 0 else (right, left)
            target.add_(layer(source.clone()).tanh())
        out: Tensor = both * 2
        return out


class Dropouts(Layers):
    """Three kinds of random numbers in every layer: their order must survive cuts."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer in self.layers:
            y = F.dropout(layer(x).tanh(), 0.1, self.training)
            x = x + y * torch.rand_like(y)[:, :1] + torch.randn(y.shape, device=y.device) * 0.01
        return x


class Transposed(nn.Module):
    """Non-contiguous values across cuts and as outputs."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(dim, dim) / dim**0.5 for _ in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map ``(batch, dim)`` to the same shape with strides ``(1, batch)``, and to its transpose."""
        for weight in self.weights:
            x = x + (weight @ x.t()).t().tanh()
        return x.t().contiguous().t(), x[:, ::2].t()


class SeveralOutputs(Layers):
    """A dict of tensors from every depth, a view of one of them, an int, a string and None."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Return the last value and all values before it, with their number, a name and None."""
        hidden = []
        for layer in self.layers:
            x = x + layer(x).tanh()
            hidden.append(x)
        extras = {"count": len(hidden), "name": "layers", "nothing": None, "largest": x.argmax(1)}
        return {"last": x, "hidden": tuple(hidden[:-1]), "input_view": hidden[0][:, :4], **extras}


class Tuples(Layers):
    """Items of tuples that the first layer's value was split into are read in every other layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        first = self.layers[0](x)
        largest, places = first.max(dim=1, keepdim=True)
        variance, mean = torch.var_mean(first, dim=1, keepdim=True)
        early = first.chunk(4, dim=1)
        for index, layer in enumerate(self.layers[1:]):
            y = layer(x).tanh() * early[index % 4].sum(1, keepdim=True).tanh()
            x = x + y * variance + mean * places.tanh() - largest / 64
        return x


class RunningBuffers(Layers):
    """Float and integer buffers that every layer updates and then reads."""

    means: Tensor
    calls: Tensor

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__(dim, layers)
        self.register_buffer("means", torch.zeros(layers, dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for index, layer in enumerate(self.layers):
            y = layer(x)
            self.means[index].lerp_(y.detach().mean(0), 0.1)
            self.calls.add_(1)
            # A sum, not a quotient: torch 2.13 recomputes a saved value from the buffer after later updates
            # (pytorch#197039), so gradients of a quotient are wrong even without any cut.
            x = x + (y - self.means[index].clone()).tanh() + self.calls.clone() / 64
        return x


CASES = (
    rows_case("in_place", InPlace),
    rows_case("views_in_place", ViewsInPlace, dim=320, inputs=partial(arrays, shape=(32, 640))),
    rows_case("dropout", Dropouts),
    rows_case("transposed", Transposed),
    rows_case("several_outputs", SeveralOutputs),
    rows_case("tuples", Tuples),
    rows_case("buffers", RunningBuffers),
)
