"""ddpopt.judge.judging.determinism: the operation that does not give the same twice is named."""

import random
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.judge.judging.determinism import NOT_FOUND, NOT_RUN, blame
from ddpopt.judge.matrix import CASES

CPU = torch.device("cpu")


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


def test_a_number_from_outside_of_torch_is_seen_where_it_enters() -> None:
    found = blame(case_of(lambda x: x.relu() * random.random()), 0, CPU)
    assert found == "aten.mul.Tensor (call 1) was given other numbers"


def test_another_order_of_operations_is_named() -> None:
    runs = count()
    found = blame(case_of(lambda x: x.relu() if next(runs) % 2 else x.sigmoid()), 0, CPU)
    assert "aten.sigmoid.default in one run and aten.relu.default in the other" in found


def test_a_model_that_repeats_has_nothing_to_blame() -> None:
    assert blame(CASES[3], 0, CPU) == NOT_FOUND


def test_a_model_that_fails_without_ddp_has_its_error_told() -> None:
    def forward(x: Tensor) -> Tensor:
        raise ValueError("no process group\nhere")

    assert blame(case_of(forward), 0, CPU) == f"{NOT_RUN}: ValueError: no process group here"


def test_a_tensor_whose_bytes_cannot_be_read_is_no_error_of_eager_ddps() -> None:
    found = blame(case_of(lambda x: x.detach().to_sparse_csr().to_dense() + x), 0, CPU)
    assert found.startswith(f"{NOT_RUN}: RuntimeError: ")
