"""Tests of `benchmarks.step_rank`: the most that is held at once."""

import torch
from torch import Tensor

from benchmarks.step_rank import peak_bytes

CPU = torch.device("cpu")
NUMBERS = 1 << 16


def numbers() -> Tensor:
    return torch.empty(NUMBERS, dtype=torch.float32)


def test_two_at_once_are_twice_as_much_as_one_after_the_other() -> None:
    def both() -> None:
        kept = numbers()
        other = numbers()
        del kept, other

    def in_turn() -> None:
        kept = numbers()
        del kept
        numbers()

    held = numbers()
    assert peak_bytes(both, CPU) == 2 * 4 * NUMBERS
    assert peak_bytes(in_turn, CPU) == 4 * NUMBERS
    assert held.numel() == NUMBERS
