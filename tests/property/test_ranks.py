"""Drawn models on two and three ranks: a compiled step leaves what an eager one does.

All ranks draw the same examples, and judge each of them together.
"""

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from ddpopt.ranks.group import joined
from ddpopt.testing import Ranks
from ddpopt.testing.drawn import DrawnModel
from ddpopt.testing.strategies import models
from tests.support.found import OURS, assert_right, examined
from tests.support.profiles import share
from tests.support.stepping import MARKS

pytestmark = MARKS[1:]  # a group of all ranks is there
LIMIT_S = 30.0
"""Of a collective: a rank that its peers left fails after it."""


def assert_steps_are_equal(ranks: Ranks, portion: float, *, at_least: int) -> None:
    """On all ranks, of some drawn models."""
    # shrinking ends by the clock, and ranks must do the same; test_semantics.py shrinks what one rank shows
    how_many = settings(share(portion, at_least=at_least), phases=[Phase.generate], database=None)
    own_seed = 0 if how_many.derandomize else hash(object())

    with joined(timeout_s=LIMIT_S) as group:

        @seed(ranks.gather(own_seed)[0])
        @how_many
        @given(models(without={"cond"}, max_steps=4), st.sampled_from(OURS))
        def holds(drawn: DrawnModel, mode: str) -> None:
            assert_right(drawn, examined(group, drawn, mode))

        holds()


@pytest.mark.world_size(2, backend="gloo", timeout=280)
def test_a_compiled_step_on_two_ranks_has_the_effects_of_an_eager_one(ddp_ranks: Ranks) -> None:
    assert_steps_are_equal(ddp_ranks, 0.02, at_least=2)


@pytest.mark.nightly
@pytest.mark.world_size(3, backend="gloo", timeout=280)
def test_a_compiled_step_on_three_ranks_has_the_effects_of_an_eager_one(ddp_ranks: Ranks) -> None:
    assert_steps_are_equal(ddp_ranks, 0.01, at_least=2)
