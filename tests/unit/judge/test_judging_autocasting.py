"""ddpopt.judge.judging.autocasting: in which dtype a model computes by its own choice."""

import pytest
import torch
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.judge.judging.autocasting import autocast_dtypes, coarsest

CPU = torch.device("cpu")


class Halving(nn.Module):
    """A layer under autocast, and one that is not; or a forward that fails behind the first."""

    def __init__(self, dtype: torch.dtype | None, *, fails: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.dtype, self.fails = dtype, fails

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            x = self.first(x)
        if self.fails:
            raise RuntimeError("only under DDP")
        output: Tensor = self.second(x.float())
        return output


def seen(dtype: torch.dtype | None, *, fails: bool = False) -> set[torch.dtype]:
    case = Case(
        "halving",
        lambda: Halving(dtype, fails=fails),
        lambda rank, step: ((torch.ones(2, 4),), {}),
        "autocast",
    )
    before = torch.get_rng_state()
    found = autocast_dtypes(case, 0, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    return found


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_the_dtype_of_a_span_of_autocast_is_seen_also_where_the_forward_fails_later(
    dtype: torch.dtype | None, fails: bool
) -> None:
    assert seen(dtype, fails=fails) == ({dtype} if dtype else set())


def test_the_coarsest_dtype_rounds_most() -> None:
    assert coarsest([torch.float16, torch.bfloat16, torch.float32]) is torch.bfloat16
    assert coarsest([]) is None
