"""A model that opens autocast itself: compiled code may leave out roundings; a fault stays a fault."""

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.verdict import Status
from ddpopt.ranks.group import Ranks


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


@pytest.mark.parametrize(("model", "status"), [(Block, Status.OK), (Wrong, Status.WRONG)])
def test_roundings_that_are_left_out_are_no_fault(model: type[Block], status: Status, alone: Ranks) -> None:
    subject = Subject(case_of(model), option("default"), 2, alone.device, evaluates=False)
    with closing(Bench(subject, alone)) as bench:
        reference = Reference.make(bench)
        assert reference is not None
        trial = judge(reference, mode("whole"), "inductor")
    assert trial.status is status, trial.findings
