"""ddpopt.judge.judging.record: each has a name, and is known by what it depends on."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ddpopt.judge.judging.record import (
    FINAL,
    PARAMETER,
    NumberKind,
    Record,
    RecordedStep,
    Rules,
    left_behind,
    pairs,
)

W, B = torch.ones(2, 2), torch.ones(3)


def record_of(**changes: Any) -> Record:
    step = RecordedStep(
        loss=torch.tensor(1.0),
        gradients={"w": W * 2, "unused": None},
        state={"w": W, "unused": B, "mean": B, "count": torch.tensor(3)},
        random=torch.zeros(0),
        extras={"norm": torch.tensor(2.0), "evaluated": torch.tensor(1.0), "calls": 3},
        final={"w": W, "unused": None},
        late=frozenset({"norm"}),
    )
    return Record({}, steps=[replace(step, **changes)])


def test_every_number_is_listed_by_what_it_depends_on() -> None:
    assert {name: kind for name, (kind, _) in left_behind(record_of().steps[0]).items()} == {
        "w": NumberKind.GRADIENT,
        "the loss": NumberKind.FORWARD,
        "final gradient of w": NumberKind.FINISHED,
        "the norm": NumberKind.FINISHED,
        "the evaluated": NumberKind.FORWARD,
        "parameter w": NumberKind.PARAMETER,
        "parameter unused": NumberKind.PARAMETER,
        "buffer mean": NumberKind.FORWARD,
    }


def test_numbers_of_the_same_form_are_paired() -> None:
    found = {number.name: number for number in pairs(record_of(), record_of(gradients={"w": W * 3}))}
    assert found["w"].got.equal(W * 2)
    assert found["w"].eager.equal(W * 3)
    assert found["final gradient of w"].plain == "w"
    for other in (B, W.double()):
        assert "w" not in {number.name for number in pairs(record_of(), record_of(gradients={"w": other}))}
    assert {"norm", "the norm"} <= set(left_behind(record_of(gradients={"norm": B}).steps[0]))


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


def test_what_is_not_reproduced_or_summed_in_another_order_is_judged_by_rounding_and_nothing_else_is() -> (
    None
):
    rules = Rules(exact=True, ordered=True, means=True, unstable=frozenset({"a"}), resummed=frozenset({"b"}))
    for name in "ab":
        assert rules.levels(NumberKind.GRADIENT, name) == ("L2",)
    assert rules.levels(NumberKind.FINISHED, FINAL + "a") == ("L2",)
    assert rules.levels(NumberKind.FINISHED, FINAL + "b") == ("L0",)  # it is equal
    assert rules.levels(NumberKind.GRADIENT, "c") == ("L0", "L1")
    assert rules.levels(NumberKind.FORWARD, "the loss") == ("L0",)


@pytest.mark.parametrize(("rules", "level"), [(TWO_RANKS, "L0"), (THREE_RANKS, "L0"), (INDUCTOR, "L2")])
def test_a_gradient_that_ddp_leaves_alone_is_no_sum_over_ranks(rules: Rules, level: str) -> None:
    leaving_alone = replace(rules, ignored=frozenset({"weight"}))
    assert leaving_alone.levels(NumberKind.GRADIENT, "weight") == (level,)
    assert leaving_alone.levels(NumberKind.GRADIENT, "bias") == rules.levels(NumberKind.GRADIENT, "bias")


def test_of_what_a_step_leaves_gradients_and_what_comes_of_them_are_sums() -> None:
    rules = replace(TWO_RANKS, written=frozenset({"w"}))
    assert [kind for kind in NumberKind if rules.sums(kind, "u")] == [
        NumberKind.OWN,
        NumberKind.GRADIENT,
        NumberKind.FINISHED,
    ]
    assert rules.sums(NumberKind.PARAMETER, PARAMETER + "w")
