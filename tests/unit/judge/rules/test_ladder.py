"""ddpopt.judge.rules.ladder: a finding names the first wrong step, the ranks, and the elements."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddpopt.judge.compare import Sum, bitwise, communication
from ddpopt.judge.rules.arithmetic import arithmetic, arithmetic_of
from ddpopt.judge.rules.ladder import Sheet, findings, worst
from ddpopt.judge.training.record import Number, NumberKind

RIGHT = torch.linspace(1, 2, 12).view(3, 4)


def wrong(by: float = 0.5) -> Tensor:
    changed = RIGHT.clone()
    changed[1, 2:] += torch.tensor([by, 2 * by])
    return changed


def number(got: Tensor, step: int = 0) -> Number:
    return Number(step, f"step {step}", "w", NumberKind.GRADIENT, got, RIGHT)


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_the_wrong_elements_and_the_worst_of_them_are_named(level: str) -> None:
    got = wrong()
    if level == "L0":
        found = bitwise(got, RIGHT)
    elif level == "L1":
        terms = Sum(RIGHT.double() * 2, RIGHT.double() * 2, 2, torch.full_like(RIGHT, 2).double())
        found = communication(got, terms)
    else:
        samples = [RIGHT + 1e-7 * place for place in range(4)]
        found = arithmetic(got, arithmetic_of(samples, RIGHT.double()))
    assert not found.right
    assert found.region is not None
    assert found.region.indices == "[1, 2:4]"
    assert found.region.worst == (1, 3)
    assert (found.region.count, found.region.of) == (2, 12)
    assert found.region.got == float(got[1, 3])
    assert found.region.expected == float(RIGHT[1, 3])


def test_a_number_that_is_not_finite_is_the_worst() -> None:
    got = wrong()
    got[2, 0] = torch.nan
    region = bitwise(got, RIGHT).region
    assert region is not None
    assert (region.worst, region.indices) == ((2, 0), "[1:3, 0:4]")


def test_the_first_wrong_step_counts_and_not_the_worst_and_all_ranks_are_named() -> None:
    sheets = [Sheet(rank, {"w": 3}) for rank in range(3)]
    for step, by in enumerate((0.0, 0.25, 64.0)):
        for sheet in sheets:
            got = number(wrong(by if sheet.rank else 0.0), step)
            sheet.add("L0", got, bitwise(got.got, got.eager))
    sheets = [sheet.in_short() for sheet in sheets]
    [finding] = findings(sheets, worst(item for sheet in sheets for item in sheet.judged), ["w"])
    assert (finding.step, finding.ranks, finding.bucket) == (1, (1, 2), 3)
    assert "bucket 3, step 1, ranks 1, 2: off by 0.5 where 0 is allowed" in finding.message
    assert finding.message.endswith("; 2 of 12 elements, in [1, 2:4]; at [1, 3] 2.13636 instead of 1.63636")
    alone = replace(sheets[1], rank=0)
    [finding] = findings([alone, *sheets[1:]], worst(alone.judged), ["w"])
    assert ", all ranks: " in finding.message


def test_what_is_right_has_no_region() -> None:
    assert bitwise(RIGHT, RIGHT.clone()).region is None
