"""Parameters of unusual kinds: several dtypes, complex, reparametrized, slices of one storage."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ddpopt.cases.corpus.draws import arrays_case, rows_case


class MixedDtypes(nn.Module):
    """Float32 and bfloat16 weights in turn: DDP buckets them apart."""

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
    """Parameters that are slices of one storage, each to be counted at its own size."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        sizes = [dim * dim, dim] * layers
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
    """Complex weights, 8 bytes per element, between real ones.

    They act on the spectrum of a real signal, with a real layer at each end.
    """

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
    rows_case("mixed_dtypes", MixedDtypes, layers=10),
    rows_case(
        "weight_norm",
        partial(Parametrized, "weight_norm"),
        "weights computed from a magnitude and a direction each time they are read (pytorch#113415)",
        layers=7,
    ),
    rows_case(
        "spectral_norm",
        partial(Parametrized, "spectral_norm"),
        "weights divided by a norm that a power iteration keeps in buffers (pytorch#113415)",
        layers=7,
    ),
    rows_case("flat_storage", FlatStorage),
    arrays_case("complex", partial(ComplexLayers, widths=(512, 512, 512, 512)), (32, 512)),
)
