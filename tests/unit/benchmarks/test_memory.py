"""Tests of `benchmarks.step_rank`: the most that is held at once."""

import torch
from torch import Tensor

from benchmarks.step_rank import peak_bytes, peak_of

CPU = torch.device("cpu")
NUMBERS = 1 << 16


def numbers() -> Tensor:
    return torch.empty(NUMBERS, dtype=torch.float32)


def test_what_is_freed_before_the_peak_or_was_held_before_is_not_part_of_it() -> None:
    assert peak_of([10, -10, 6, 5, -3, 1]) == 11
    assert peak_of([-100, 30]) == 0


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
