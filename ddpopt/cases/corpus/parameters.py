"""Parameters of unusual kinds: several dtypes, complex, reparametrized, slices of one storage."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ddpopt.cases.case import Case
from ddpopt.cases.corpus.draws import rows, seeded


class MixedDtypes(nn.Module):
    """Linear layers that alternate between float32 and bfloat16, as models with kept-in-float32 parts do."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.dtypes = tuple((torch.float32, torch.bfloat16)[i % 2] for i in range(layers))
        self.layers = nn.ModuleList(nn.Linear(dim, dim, dtype=dtype) for dtype in self.dtypes)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape, in float32."""
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = x + layer(x.to(dtype)).relu()
        return x


class Parametrized(nn.Module):
    """Linear layers whose weight is computed from other parameters at every reading."""

    def __init__(self, parametrize: str, dim: int, layers: int) -> None:
        super().__init__()
        wrap = getattr(parametrizations, parametrize)
        self.layers = nn.ModuleList(wrap(nn.Linear(dim, dim)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


class FlatStorage(nn.Module):
    """All weights and biases are slices of one storage, as optimizers with flat buffers make them."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        sizes = (dim * dim, dim) * layers
        flat = torch.randn(sum(sizes)) / dim**0.5
        slices = [part.view(dim, -1).squeeze(1) for part in flat.split(sizes)]
        self.weights = nn.ParameterList(slices[0::2])
        self.biases = nn.ParameterList(slices[1::2])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + F.linear(x, weight, bias).tanh()
        return x


class ComplexLayers(nn.Module):
    """Complex weights over the spectrum of a real signal, with a real layer at each end."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(widths[0], widths[0])
        bins = tuple(width // 2 + 1 for width in widths)
        self.mixers = nn.ParameterList(
            torch.randn(before, after, dtype=torch.complex64) / before**0.5
            for before, after in pairwise(bins)
        )
        self.last = nn.Linear(widths[-1], widths[-1])

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, widths[0])`` to ``(batch, widths[-1])``."""
        spectrum = torch.fft.rfft(self.first(x), norm="ortho")
        for mixer in self.mixers:
            spectrum = spectrum @ mixer
            spectrum = spectrum / (1 + spectrum.abs())
        out: Tensor = self.last(torch.fft.irfft(spectrum, norm="ortho"))
        return out


CASES = (
    Case(
        name="mixed_dtypes",
        model=partial(seeded, MixedDtypes, dim=384, layers=10),
        inputs=partial(rows, batch=32, width=384),
        about="float32 and bfloat16 weights in turn: DDP buckets them apart",
    ),
    Case(
        name="weight_norm",
        model=partial(seeded, Parametrized, "weight_norm", dim=384, layers=7),
        inputs=partial(rows, batch=32, width=384),
        about="weights computed from a magnitude and a direction at every reading (pytorch#113415)",
    ),
    Case(
        name="spectral_norm",
        model=partial(seeded, Parametrized, "spectral_norm", dim=384, layers=7),
        inputs=partial(rows, batch=32, width=384),
        about="weights divided by a norm that a power iteration keeps in buffers (pytorch#113415)",
        tags=("buffers",),
    ),
    Case(
        name="flat_storage",
        model=partial(seeded, FlatStorage, dim=384, layers=8),
        inputs=partial(rows, batch=32, width=384),
        about="parameters that are slices of one storage, each to be counted at its own size",
    ),
    Case(
        name="complex",
        model=partial(seeded, ComplexLayers, widths=(512, 512, 512, 512)),
        inputs=partial(rows, batch=32, width=512),
        about="complex weights, 8 bytes an element, between real ones",
    ),
)
