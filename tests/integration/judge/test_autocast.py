"""A model that opens autocast itself: compiled code may leave out roundings; a fault stays a fault."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.judge.runner import verify_here
from ddpopt.ranks.group import one_rank


class Block(nn.Module):
    """What transformers have between two matrix products, under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(32, 64)
        self.norm = nn.LayerNorm(64)
        self.gate = nn.Linear(64, 64)
        self.narrow = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.norm(F.gelu(self.wide(x)))
            x = torch.tanh(self.gate(x)) * x
            if torch.compiler.is_compiling():
                x = x * self.error
            output: Tensor = self.narrow(x).float()
        return output

    error = 1.0


class Wrong(Block):
    """Off by a tenth, as compiled."""

    error = 1.1


def case_of(model: type[Block]) -> Case:
    def inputs(rank: int, step: int) -> tuple[tuple[Tensor], dict[str, object]]:
        return (torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * step + rank)),), {}

    return Case(model.__name__, model, inputs, "autocast inside")


@pytest.mark.parametrize(
    ("model", "exit_code"), [(Block, 0), pytest.param(Wrong, 1, marks=pytest.mark.nightly)]
)
def test_roundings_that_a_compiler_leaves_out_are_no_fault(model: type[Block], exit_code: int) -> None:
    torch._dynamo.reset()
    with one_rank():
        verdict = verify_here(case_of(model), mode="whole", backend="inductor", steps=2)
    assert verdict.exit_code == exit_code, verdict.findings
