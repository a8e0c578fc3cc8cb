"""ddpopt.judge.training.record: the level of a number follows from what it depends on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ddpopt.judge.training.record import FINAL, PARAMETER, Number, NumberKind, Rules, optimizer_state

ONE = torch.ones(())


def number(kind: NumberKind, name: str, *, is_extra: bool = False) -> Number:
    return Number(0, "two backwards" if is_extra else "step 0", name, kind, ONE, ONE, is_extra)


@pytest.mark.parametrize(
    ("rules", "forward", "gradient", "finished"),
    [
        (Rules(exact=True, ordered=True, means=True), ("L0",), ("L0", "L1"), ("L0",)),
        (Rules(exact=True, ordered=True, means=False), ("L0",), ("L0",), ("L0",)),
        (Rules(exact=True, ordered=False, means=True), ("L0",), ("L1",), ("L2",)),
        (Rules(exact=True, ordered=False, means=False), ("L0",), ("L2",), ("L2",)),
        (Rules(exact=False, ordered=True, means=True), ("L2",), ("L2",), ("L2",)),
        (Rules(exact=False, ordered=False, means=True), ("L2",), ("L2",), ("L2",)),
        (Rules(exact=True, ordered=True, means=True, shards=True), ("L0",), ("L0", "L1"), ("L2",)),
    ],
)
def test_the_level_follows_from_what_a_number_depends_on(
    rules: Rules, forward: tuple[str, ...], gradient: tuple[str, ...], finished: tuple[str, ...]
) -> None:
    assert rules.levels(number(NumberKind.FORWARD, "the loss")) == forward
    assert rules.levels(number(NumberKind.GRADIENT, "w")) == gradient
    assert rules.levels(number(NumberKind.FINISHED, FINAL + "w")) == finished
    assert rules.levels(number(NumberKind.PARAMETER, PARAMETER + "w")) == ("L0",)
    # a parameter that something else writes to; a gradient that DDP leaves alone, so no sum over ranks
    others = replace(rules, written=frozenset({"w"}), ignored=frozenset({"w"}))
    assert rules.shards or others.levels(number(NumberKind.PARAMETER, PARAMETER + "w")) == finished
    assert others.levels(number(NumberKind.GRADIENT, "w")) == forward
    assert others.levels(number(NumberKind.GRADIENT, "bias")) == gradient
    # of an extra step the sums over ranks are not known, and it is another number than that of the steps
    extra = number(NumberKind.GRADIENT, "w", is_extra=True)
    assert rules.levels(extra) == finished or rules.shards
    assert replace(rules, unstable=frozenset({"w"})).levels(extra) == rules.levels(extra)
    assert replace(rules, unstable=frozenset({"two backwards: w"})).levels(extra) == ("L2",)


def test_an_optimizer_has_no_state_here_for_what_another_rank_updates() -> None:
    first, second = torch.ones(2), torch.ones(2)
    sharded = SimpleNamespace(state={first: {"step": ONE, "name": "first"}, second: None})
    assert optimizer_state(sharded, [("first", first), ("second", second)]) == {"step of first": ONE}
