"""Drawn models on two and three ranks: every rank leaves a compiled step where it leaves an eager one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st

from ddpopt.testing import Ranks
from ddpopt.testing.drawn import DrawnModel
from ddpopt.testing.strategies import models
from tests.profiles import share
from tests.property.lockstep import RanksDisagreeError, hold_on_ranks
from tests.property.stepping import MARKS, STRATEGIES, Strategy, assert_equal_steps, compiled, eager, trained

pytestmark = MARKS[1:]  # a group of all ranks is there

Drawn = tuple[DrawnModel, Strategy]
DRAWN = st.tuples(models(without={"cond"}, max_steps=4), st.sampled_from(STRATEGIES))


def steps_are_equal(drawn: Drawn, group: dist.ProcessGroup) -> None:
    model, strategy = drawn
    expected = trained(model, eager, group=group)
    assert_equal_steps(model, compiled(strategy), expected, group=group)


def assert_steps_are_equal(ranks: Ranks, how_many: settings) -> None:
    """On all ranks, of as many drawn models as asked; what is unequal raises."""
    on_all = 0

    def together(drawn: Drawn, group: dist.ProcessGroup) -> None:
        nonlocal on_all
        steps_are_equal(drawn, group)
        on_all += 1

    hold_on_ranks(ranks, DRAWN, steps_are_equal, together, how_many)
    assert on_all >= how_many.max_examples


@pytest.mark.world_size(2, backend="gloo", timeout=280)
def test_a_compiled_step_on_two_ranks_leaves_behind_what_an_eager_one_does(ddp_ranks: Ranks) -> None:
    assert_steps_are_equal(ddp_ranks, share(0.02, at_least=4))


@pytest.mark.world_size(3, backend="gloo", timeout=280)
def test_a_compiled_step_on_three_ranks_leaves_behind_what_an_eager_one_does(ddp_ranks: Ranks) -> None:
    assert_steps_are_equal(ddp_ranks, share(0.01, at_least=4))


class TooMuch:
    """Fails from some number on, where it runs in a group of that size, and counts its calls."""

    def __init__(self, limit: int, size: int, only_on: int = 0) -> None:
        self.limit, self.size, self.only_on = limit, size, only_on
        self.calls = 0

    def __call__(self, number: int, group: dist.ProcessGroup) -> None:
        self.calls += 1
        total = torch.tensor(number)
        dist.all_reduce(total, group=group)
        assert total == number * dist.get_world_size(group)
        here = dist.get_world_size(group) == self.size and dist.get_rank() == self.only_on
        assert number < self.limit or not here, f"{number} is too much"


@pytest.mark.world_size(2, backend="gloo", timeout=280)
def test_what_fails_on_one_process_shrinks_there_and_what_needs_ranks_on_them(ddp_ranks: Ranks) -> None:
    fifty = share(1, at_least=50)
    on_one = TooMuch(7, size=1)
    together = TooMuch(7, size=1)
    with pytest.raises(AssertionError, match="7 is too much"):
        hold_on_ranks(ddp_ranks, st.integers(0, 100), on_one, together, fifty)
    assert together.calls < on_one.calls or ddp_ranks.rank
    with pytest.raises(RanksDisagreeError, match="7 is too much"):
        hold_on_ranks(
            ddp_ranks, st.integers(0, 100), TooMuch(7, size=2, only_on=1), TooMuch(7, 2, only_on=1), fifty
        )
