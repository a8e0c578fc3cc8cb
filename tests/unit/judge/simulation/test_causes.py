"""ddpopt.judge.simulation.causes: the line after which two runs part, and inputs that differ."""

from collections.abc import Callable

import pytest
import torch

from ddpopt.judge.simulation.causes import Line, branch, noting_lines, unlike_inputs


def called(number: int) -> bool:
    return number > 1


def parting(number: int) -> int:
    total = 0
    for each in range(2):
        if called(number + each):  # the branch
            total += each
    return total


def lines_of(run: Callable[[int], int], number: int) -> list[Line]:
    lines: list[Line] = []
    with noting_lines(lines):
        run(number)
    return lines


def test_the_branch_is_named_where_it_is_and_not_in_what_it_calls() -> None:
    found = branch(lines_of(parting, 5), lines_of(parting, 0))
    assert "in parting: if called(number + each):  # the branch" in found


def test_equal_runs_have_no_branch() -> None:
    assert branch(lines_of(parting, 5), lines_of(parting, 6)) == ""


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (((torch.zeros(3, 8),), {}), ((torch.ones(3, 8),), {}), "inputs of the same form"),
        (((torch.zeros(3, 8),), {}), ((torch.zeros(4, 8),), {}), "input 0 is torch.float32 (3, 8)"),
        (((), {"mask": None}), ((), {"mask": 2}), "input mask is None and not 2"),
    ],
)
def test_inputs_are_compared_by_form_and_small_ones_by_value(
    theirs: object, ours: object, words: str
) -> None:
    assert words in unlike_inputs(theirs, ours)
