"""ddpopt.judge.judging.record: the level of a number follows from what it depends on."""

from dataclasses import replace

import pytest

from ddpopt.judge.judging.record import FINAL, PARAMETER, NumberKind, Rules


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
    assert rules.levels(NumberKind.FORWARD, "the loss") == forward
    assert rules.levels(NumberKind.GRADIENT, "w") == gradient
    assert rules.levels(NumberKind.FINISHED, FINAL + "w") == finished
    assert rules.levels(NumberKind.PARAMETER, PARAMETER + "w") == ("L0",)
    # a parameter that something else writes to; a gradient that DDP leaves alone, so no sum over ranks
    others = replace(rules, written=frozenset({"w"}), ignored=frozenset({"w"}))
    assert rules.shards or others.levels(NumberKind.PARAMETER, PARAMETER + "w") == finished
    assert others.levels(NumberKind.GRADIENT, "w") == forward
    assert others.levels(NumberKind.GRADIENT, "bias") == gradient
