"""Parameters that reach an operator other than as a plain positional argument."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ddpopt.cases.corpus.draws import rows_case


class Weights(nn.Module):
    """Square weights and biases without layers around them; subclasses define how they are read."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(dim, dim) / dim**0.5 for _ in range(layers))
        self.biases = nn.ParameterList(torch.randn(dim) * 0.1 for _ in range(layers))


class KeywordArguments(Weights):
    """Weights by keyword, which torch's optimizer does not see."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = F.linear(x, weight=weight, bias=bias).tanh()
        return x


class ListArguments(Weights):
    """Weights inside lists, which torch's optimizer does not see."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape; four weights per iteration."""
        stacked_bias = torch.stack(list(self.biases))
        for first in range(0, len(self.weights), 4):
            a, b, c, d = (self.weights[first + i] for i in range(4))
            x = x + torch.linalg.multi_dot([x, a, b]).tanh()
            x = x + torch.einsum("bi,io->bo", [x, c]).tanh()
            x = x + (torch.cat([x, x], dim=1) @ torch.cat([d, c])).tanh()
            x = x + stacked_bias[first : first + 4].sum(0)
        return x


class DictArguments(Weights):
    """Weights in a dictionary, put into another module by torch.func.functional_call."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__(dim, layers)
        self.layer = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            y: Tensor = functional_call(self.layer, {"weight": weight, "bias": bias}, (x,))
            x = x + y.tanh()
        return x


class MethodArguments(Weights):
    """Weights as receivers and arguments of methods: transposed, sliced, cast before they are used."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, dim)`` to the same shape; four weights per iteration."""
        half = x.shape[1] // 2
        for first in range(0, len(self.weights), 4):
            a, b, c, d = (self.weights[first + i] for i in range(4))
            x = x + a.matmul(x.t()).t().tanh()
            x = x + x.matmul(b.t()).add(self.biases[first]).tanh()
            x = x + torch.cat((x.mm(c[:, :half]), x.mm(c[:, half:])), dim=1).tanh()
            x = x + x.bfloat16().mm(d.bfloat16()).float().tanh()
            x = x + sum(self.biases[first + i].expand_as(x) for i in (1, 2, 3))
        return x


CASES = (
    rows_case("keyword", KeywordArguments),
    rows_case("list", ListArguments),
    rows_case("dict", DictArguments),
    rows_case("methods", MethodArguments),
)
