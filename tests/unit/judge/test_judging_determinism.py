"""ddpopt.judge.judging.determinism: the operation that does not give the same twice is named."""

import random
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.judge.judging.determinism import NOT_FOUND, NOT_RUN, blame
from ddpopt.judge.matrix import CASES

CPU = torch.device("cpu")
RUNS = count()


def case_of(forward: Any) -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return forward(self.layer(x))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return Model()

    return Case("drawn", model, lambda rank, step: ((torch.ones(2, 3),), {}), "does not repeat")


def test_an_operation_with_a_generator_of_its_own_is_named() -> None:
    def forward(x: Tensor) -> Tensor:
        free = torch.Generator()
        free.seed()
        return x * torch.rand(3, generator=free)

    assert blame(case_of(forward), 0, CPU) == "aten.rand.generator (call 1) returned something else"


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda x: x.relu() * random.random(), "aten.mul.Tensor (call 1) was given other numbers"),
        (
            lambda x: x.relu() if next(RUNS) % 2 else x.sigmoid(),
            "aten.sigmoid.default in one run and aten.relu.default in the other",
        ),
        # its bytes cannot be read, which is no error of eager DDP's
        (lambda x: x.detach().to_sparse_csr().to_dense() + x, f"{NOT_RUN}: RuntimeError: "),
    ],
)
def test_a_number_from_outside_of_torch_or_another_order_of_operations_is_named(
    forward: Any, words: str
) -> None:
    assert words in blame(case_of(forward), 0, CPU)


def test_a_model_that_repeats_has_nothing_to_blame() -> None:
    assert blame(CASES[3], 0, CPU) == NOT_FOUND


def test_a_model_that_fails_without_ddp_has_its_error_told() -> None:
    def forward(x: Tensor) -> Tensor:
        raise ValueError("no process group\nhere")

    assert blame(case_of(forward), 0, CPU) == f"{NOT_RUN}: ValueError: no process group here"
