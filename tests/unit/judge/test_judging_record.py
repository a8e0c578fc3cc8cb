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

TWO_RANKS = Rules(exact=True, ordered=True, means=True)
THREE_RANKS = Rules(exact=True, ordered=False, means=True)
NO_MEANS = Rules(exact=True, ordered=False, means=False)
INDUCTOR = Rules(exact=False, ordered=True, means=True)


@pytest.mark.parametrize(
    ("rules", "forward", "gradient", "finished"),
    [
        (TWO_RANKS, ("L0",), ("L0", "L1"), ("L0",)),
        (Rules(exact=True, ordered=True, means=False), ("L0",), ("L0",), ("L0",)),
        (THREE_RANKS, ("L0",), ("L1",), ("L2",)),
        (NO_MEANS, ("L0",), ("L2",), ("L2",)),
        (INDUCTOR, ("L2",), ("L2",), ("L2",)),
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


def test_a_parameter_that_something_else_writes_to_is_judged_as_what_it_is() -> None:
    for rules, level in ((TWO_RANKS, "L0"), (THREE_RANKS, "L2"), (INDUCTOR, "L2")):
        written = Rules(rules.exact, rules.ordered, rules.means, written=frozenset({"w"}))
        assert written.levels(NumberKind.PARAMETER, PARAMETER + "w") == (level,)


@pytest.mark.parametrize(("rules", "level"), [(TWO_RANKS, "L0"), (THREE_RANKS, "L0"), (INDUCTOR, "L2")])
def test_a_gradient_that_ddp_leaves_alone_is_no_sum_over_ranks(rules: Rules, level: str) -> None:
    leaving_alone = replace(rules, ignored=frozenset({"weight"}))
    assert leaving_alone.levels(NumberKind.GRADIENT, "weight") == (level,)
    assert leaving_alone.levels(NumberKind.GRADIENT, "bias") == rules.levels(NumberKind.GRADIENT, "bias")
