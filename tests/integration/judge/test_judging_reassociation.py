"""ddpopt.judge.judging.reassociation: a plan proves things of its own graph, and of no other."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpopt
from ddpopt.cases.case import Case
from ddpopt.judge.judging.reassociation import (
    NOT_THIS_PLAN,
    NOT_TRACED,
    Reassociated,
    reassociated,
    together,
)
from ddpopt.judge.judging.reference import Bench, Subject
from ddpopt.judge.option_cases import set_extra
from ddpopt.judge.options import option
from ddpopt.judge.trainer import Option
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks, joined, one_rank

CAP = {"bucket_cap_mb": 1e-4}


class Reading(nn.Module):
    """A value that is read once where it is made, twice behind a layer, and once more behind another."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            with torch.no_grad():
                self.last.bias.mul_(0.5)
        shared = self.first(x)
        inner = self.middle(shared.relu()) + shared.sigmoid() * shared.cos()
        output: Tensor = self.last(inner) + shared.tanh()
        return output


class Ignoring(Reading):
    """The same, but DDP is told to leave the first layer's weight alone."""

    _ddp_params_and_buffers_to_ignore = ("first.weight",)


class Cut(nn.Module):
    """Two layers; what is done with them is up to the test."""

    def __init__(self, work: Callable[[nn.Linear, nn.Linear, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.work = work

    def forward(self, x: Tensor) -> Any:
        return self.work(self.first, self.last, x)


def writing(first: nn.Linear, last: nn.Linear, x: Tensor) -> Any:
    """What the first layer makes is written into a value that is read twice."""
    shared = x + 1
    shared[:, 0] = first(x)[:, 0]
    return last(shared).cos() + shared.tanh()


def turning(first: nn.Linear, last: nn.Linear, x: Tensor) -> Any:
    """A value whose gradient comes back in another layout."""
    return last(first(x).transpose(1, 2).sin())


def returning(first: nn.Linear, last: nn.Linear, x: Tensor) -> Any:
    """A value that one operation reads, and that is returned besides."""
    value = first(x)
    return last(value * value), value


CASE = Case(
    "reading",
    Reading,
    lambda rank, step: ((torch.ones(2, 8),), {}),
    "a value read three times",
    ddp_kwargs=CAP,
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with one_rank(), joined() as found:
        yield found


def found(ranks: Ranks, chosen: Option, mode: str, plan: Plan | None, case: Case = CASE) -> Reassociated:
    bench = Bench(Subject(case, chosen, 1, ranks.device), ranks)
    try:
        return reassociated(bench, mode, plan)
    finally:
        bench.close()


def plan_of(chosen: Option, used: bool, case: Case = CASE) -> Plan:
    case = chosen.adapt(case)
    model = case.model()
    set_extra(model, used)
    args, _ = case.inputs(0, 0)
    given: dict[str, Any] = {"find_unused_parameters": True} if chosen.needs == "arguments" else {}
    return ddpopt.plan(model, *args, strategy="split", **{**CAP, **given})


def test_a_cut_moves_what_is_read_on_both_of_its_sides(ranks: Ranks) -> None:
    moved = found(ranks, option("default"), "ddpopt-split", plan_of(option("default"), used=True))
    assert moved.reached == {"first.weight", "first.bias"}
    assert moved.unproved == ()


def test_what_a_cut_moves_reaches_parameters_that_ddp_leaves_alone_too(ranks: Ranks) -> None:
    case = replace(CASE, model=Ignoring)
    chosen = option("default")
    plan = plan_of(chosen, used=True, case=case)
    assert "first.weight" not in {name for bucket in plan.buckets for name in bucket.params}
    assert found(ranks, chosen, "ddpopt-split", plan, case).reached == {"first.weight", "first.bias"}


@pytest.mark.parametrize("used", [True, False])
def test_the_graph_is_traced_as_the_option_runs_it(ranks: Ranks, used: bool) -> None:
    name = "unused_somewhere" if used else "unused_skipped"
    moved = found(ranks, option(name), "ddpopt-split", plan_of(option(name), used))
    assert moved.reached == {"model.first.weight", "model.first.bias"}
    assert moved.unproved == ()


def test_a_plan_of_another_graph_proves_nothing_and_that_is_said(ranks: Ranks) -> None:
    moved = found(ranks, option("default"), "ddpopt-split", plan_of(option("unused_somewhere"), used=True))
    assert moved == Reassociated(unproved=(NOT_THIS_PLAN,))


def test_several_forwards_take_nothing_from_what_cuts_move(ranks: Ranks) -> None:
    plan = ddpopt.plan(Reading(), torch.ones(2, 8), strategy="split", **CAP)
    once = found(ranks, option("default"), "ddpopt-split", plan)
    twice = found(ranks, option("forward_in_no_sync"), "ddpopt-split", plan)
    assert once.values
    assert once.reached <= twice.reached
    assert {*once.values} <= {*twice.values}


def test_inline_cuts_nothing_and_so_moves_nothing(ranks: Ranks) -> None:
    moved = found(ranks, option("default"), "ddpopt-inline", plan_of(option("default"), used=True))
    assert moved == Reassociated()


def test_a_graph_that_inline_has_to_cut_is_moved_as_under_split(ranks: Ranks) -> None:
    writing = replace(CASE, model=partial(Reading, writes=True))
    plan = plan_of(option("default"), used=True, case=writing)
    both = [
        found(ranks, option("default"), mode, plan, writing) for mode in ("ddpopt-inline", "ddpopt-split")
    ]
    assert both[0] == both[1]
    assert both[0].reached == {"first.weight", "first.bias"}


@pytest.mark.parametrize("work", [writing, turning, returning])
def test_torchs_cuts_may_be_anywhere(ranks: Ranks, work: Callable[..., Any]) -> None:
    case = replace(CASE, model=partial(Cut, work), inputs=lambda rank, step: ((torch.ones(4, 8, 8),), {}))
    moved = found(ranks, option("default"), "torch", None, case)
    assert moved.reached == {"first.weight", "first.bias"}
    assert moved.unproved == ()


def test_a_model_that_cannot_be_traced_proves_nothing_and_that_is_said(ranks: Ranks) -> None:
    case = replace(CASE, inputs=lambda rank, step: ((torch.ones(2, 3),), {}))
    moved = found(ranks, option("default"), "torch", None, case)
    assert moved == Reassociated(unproved=(NOT_TRACED,))


def test_what_all_ranks_found_is_put_together() -> None:
    one = Reassociated("because", ("a",), frozenset("x"))
    two = Reassociated("because", ("a", "b"), frozenset("y"), ("not known",))
    assert together([one, two]) == Reassociated("because", ("a", "b"), frozenset("xy"), ("not known",))
