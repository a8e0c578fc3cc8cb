"""ddpopt.judge.judging.numbers: each has a name, and is known by what it depends on."""

from dataclasses import replace
from typing import Any

import torch

from ddpopt.judge.judging.numbers import Kind, left_behind, pairs
from ddpopt.judge.judging.record import Record, Step

W, B = torch.ones(2, 2), torch.ones(3)


def record_of(**changes: Any) -> Record:
    step = Step(
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
        "w": Kind.GRADIENT,
        "the loss": Kind.FORWARD,
        "final gradient of w": Kind.FINISHED,
        "the norm": Kind.FINISHED,
        "the evaluated": Kind.FORWARD,
        "parameter w": Kind.PARAMETER,
        "parameter unused": Kind.PARAMETER,
        "buffer mean": Kind.FORWARD,
    }


def test_numbers_of_the_same_form_are_paired() -> None:
    found = {number.name: number for number in pairs(record_of(), record_of(gradients={"w": W * 3}))}
    assert found["w"].got.equal(W * 2)
    assert found["w"].eager.equal(W * 3)
    assert found["final gradient of w"].plain == "w"
    for other in (B, W.double()):
        assert "w" not in {number.name for number in pairs(record_of(), record_of(gradients={"w": other}))}
    assert {"norm", "the norm"} <= set(left_behind(record_of(gradients={"norm": B}).steps[0]))
