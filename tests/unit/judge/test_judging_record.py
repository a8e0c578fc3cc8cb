"""ddpopt.judge.judging.record: each has a name, and is known by what it depends on."""

from dataclasses import replace

import pytest
import torch

from ddpopt.judge.judging.record import FINAL, PARAMETER, NumberKind, RecordedStep, Rules, left_behind


def test_every_number_is_listed_by_what_it_depends_on() -> None:
    weight, buffer, number = torch.ones(2, 2), torch.ones(3), torch.tensor(1.0)
    step = RecordedStep(
        loss=number,
        gradients={"w": weight * 2, "unused": None},
        state={"w": weight, "unused": buffer, "mean": buffer, "count": torch.tensor(3)},
        random=torch.zeros(0),
        extras={"norm": number, "evaluated": number, "calls": 3},
        final={"w": weight, "unused": None},
        late=frozenset({"norm"}),
    )
    assert {name: kind for name, (kind, _) in left_behind(step).items()} == {
        "w": NumberKind.GRADIENT,
        "the loss": NumberKind.FORWARD,
        "final gradient of w": NumberKind.FINISHED,
        "the norm": NumberKind.FINISHED,
        "the evaluated": NumberKind.FORWARD,
        "parameter w": NumberKind.PARAMETER,
        "parameter unused": NumberKind.PARAMETER,
        "buffer mean": NumberKind.FORWARD,
    }


# ---------------------------------------------------------------------------------- levels


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
