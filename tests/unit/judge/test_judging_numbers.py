"""ddpopt.judge.judging.numbers: each has a name, and is known by what it depends on."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpopt.judge.judging.numbers import Kind, left_behind, pairs, unpaired
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


def test_a_parameter_and_what_an_option_leaves_may_have_one_name() -> None:
    record = record_of(gradients={"norm": B})
    assert {"norm", "the norm"} <= set(left_behind(record.steps[0]))


def test_numbers_of_the_same_form_are_paired() -> None:
    found = {number.name: number for number in pairs(record_of(), record_of(gradients={"w": W * 3}))}
    assert found["w"].got.equal(W * 2)
    assert found["w"].eager.equal(W * 3)
    assert found["final gradient of w"].plain == "w"
    assert "w" not in {n.name for n in pairs(record_of(), record_of(gradients={"w": B}))}
    assert "w" not in {n.name for n in pairs(record_of(), record_of(gradients={"w": W.double()}))}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"extras": {"evaluated": torch.tensor(1.0)}},
            "step 0: the norm is missing, in eager DDP torch.float32 ()",
        ),
        (
            {"extras": {"norm": torch.tensor(2.0), "evaluated": torch.ones(1)}},
            "step 0: the evaluated is torch.float32 (1,), in eager DDP torch.float32 ()",
        ),
        (
            {"final": {"w": W, "unused": B}},
            "step 0: final gradient of unused is torch.float32 (3,), in eager DDP missing",
        ),
        (
            {"final": {"w": B}},
            "step 0: final gradient of w is torch.float32 (3,), in eager DDP torch.float32 (2, 2)",
        ),
    ],
)
def test_what_has_no_counterpart_of_its_form_is_a_finding(changes: dict[str, Any], message: str) -> None:
    (finding,) = unpaired(record_of(**changes), record_of(), rank=1)
    assert (finding.level, finding.rank, finding.message) == ("L3", 1, message)


def test_equal_runs_have_nothing_without_a_counterpart() -> None:
    values: list[Tensor] = [number.got for number in pairs(record_of(), record_of())]
    assert len(values) == 8
    assert list(unpaired(record_of(), record_of(), rank=0)) == []
