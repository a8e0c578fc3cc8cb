"""Drawn models on two and three ranks: every rank leaves a compiled step where it leaves an eager one.

All ranks draw the same examples. No rank waits for one that has failed: all learn of it, and all fail.
"""

from __future__ import annotations

import traceback
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from ddpopt.testing import Ranks
from ddpopt.testing.drawn import DrawnModel
from ddpopt.testing.strategies import models
from tests.profiles import share
from tests.property.stepping import MARKS, STRATEGIES, Strategy, assert_equal_steps, compiled, eager, trained

pytestmark = MARKS[1:]  # a group of all ranks is there
LIMIT_S = 30.0
"""Of a collective within an example: a rank that its peers left fails after it."""


def assert_steps_are_equal(ranks: Ranks, portion: float, *, at_least: int) -> None:
    """On all ranks, of some drawn models."""
    # shrinking ends by the clock, and ranks must do the same; test_semantics.py shrinks what one rank shows
    how_many = settings(share(portion, at_least=at_least), phases=[Phase.generate], database=None)
    own_seed = 0 if how_many.derandomize else hash(object())

    @seed(ranks.gather(own_seed)[0])
    @how_many
    @given(models(without={"cond"}, max_steps=4), st.sampled_from(STRATEGIES))
    def holds(drawn: DrawnModel, strategy: Strategy) -> None:
        errors = ranks.gather(error_of_a_step(drawn, strategy))
        assert not any(errors), "\n".join(f"rank {rank}: {error}" for rank, error in enumerate(errors))

    holds()


def error_of_a_step(drawn: DrawnModel, strategy: Strategy) -> str:
    """What a rank met, in a group of its own, which is of no use once a rank has left it in the middle."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    try:
        expected = trained(drawn, eager, group=group)
        assert_equal_steps(drawn, compiled(strategy), expected, group=group)
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.mark.world_size(2, backend="gloo", timeout=280)
def test_a_compiled_step_on_two_ranks_leaves_behind_what_an_eager_one_does(ddp_ranks: Ranks) -> None:
    assert_steps_are_equal(ddp_ranks, 0.02, at_least=4)


@pytest.mark.nightly
@pytest.mark.world_size(3, backend="gloo", timeout=280)
def test_a_compiled_step_on_three_ranks_leaves_behind_what_an_eager_one_does(ddp_ranks: Ranks) -> None:
    assert_steps_are_equal(ddp_ranks, 0.01, at_least=2)
