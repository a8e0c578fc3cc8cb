"""ddpopt.judge.rules.ladder: every number is judged at the level that its rules name."""

import copy
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.cases.matrix import CASES
from ddpopt.errors import UnsupportedError
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.modes import LOCAL, mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.ladder import OTHER_BUFFERS, RESUMMED, Ladder, Sheet
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.training.record import FINAL, LOSS, PARAMETER, SEEN, Record, left_behind
from ddpopt.judge.training.trainer import Trainer
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.verdict import Status
from ddpopt.planning.plan import Plan
from ddpopt.ranks.group import Ranks

NAME = "layers.1.weight"
OTHER = "layers.0.weight"
NORMED = CASES[2]


@pytest.fixture(scope="module")
def clipped(alone: Ranks) -> Iterator[Reference]:
    """Eager runs of a model with buffers, whose gradients are clipped."""
    with closing(Bench(Subject(NORMED, option("clipping"), 2, alone.device), alone)) as bench:
        reference = Reference.make(bench)
        assert reference is not None
        _ = reference.arithmetic
        yield reference


def climb(reference: Reference, record: Record, how: str = "whole", **rules: bool) -> Sheet:
    judged = LOCAL if how == LOCAL.name else mode(how)
    return Ladder(reference, judged, **{"exact": True, "ordered": True, **rules}).climb(record)


def changed(record: Record, step: int = 1, **changes: Any) -> Record:
    """The same run with something else in one step, each of which starts from eager's state."""
    steps = list(record.steps)
    steps[step] = replace(steps[step], **changes)
    return replace(record, steps=steps)


def scaled(loss: Tensor | None, by: float) -> Tensor:
    assert loss is not None
    return loss * by


def next_up(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor, torch.full_like(tensor, torch.inf))


def wrong_of(sheet: Sheet) -> set[tuple[str, str]]:
    return {(item.measured.level, item.measured.parameter) for item in sheet.judged if not item.right}


WAYS = {
    "two ranks": (True, True),
    "three ranks": (True, False),
    "Inductor": (False, True),
    "Inductor on three ranks": (False, False),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_number_that_a_step_leaves_is_judged_and_right(clipped: Reference, way: str) -> None:
    exact, ordered = WAYS[way]
    sheet = climb(clipped, clipped.again, exact=exact, ordered=ordered)
    judged = {(item.measured.step, item.measured.parameter) for item in sheet.judged}
    left = {(step, name) for step, one in enumerate(clipped.eager.moments) for name in left_behind(one)}
    assert judged == left
    assert sheet.findings == []
    assert wrong_of(sheet) == set()


def damaged(record: Record, what: str) -> dict[str, Any]:
    step = record.steps[1]
    if what in ("gradients", "final"):
        values = getattr(step, what)
        return {what: {**values, NAME: values[NAME] * 1.01}}
    if what == NAME:
        return {"state": {**step.state, NAME: next_up(step.state[NAME])}}
    if what == "loss":
        return {"loss": scaled(step.loss, 1.01)}
    if what == "norm":
        return {"extras": {**step.extras, "norm": step.extras["norm"] * 1.01}}
    return {"state": {**step.state, what: step.state[what] * 1.01}}


DAMAGE = {
    "gradients": ({"L0", "L1"}, {"L1"}, {"L2"}, NAME),
    "final": ({"L0"}, {"L2"}, {"L2"}, FINAL + NAME),
    "loss": ({"L0"}, {"L0"}, {"L2"}, LOSS),
    "norm": ({"L0"}, {"L2"}, {"L2"}, SEEN + "norm"),
    "between.running_mean": ({"L0"}, {"L0"}, {"L2"}, "buffer between.running_mean"),
    NAME: ({"L0"}, {"L0"}, {"L0"}, PARAMETER + NAME),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_whatever_is_wrong_is_found_in_every_way_to_judge(clipped: Reference, what: str) -> None:
    *expected, name = DAMAGE[what]
    record = changed(clipped.again, **damaged(clipped.again, what))
    for (exact, ordered), levels in zip([*WAYS.values()][:3], expected, strict=True):
        wrong = wrong_of(climb(clipped, record, exact=exact, ordered=ordered))
        assert {level for level, parameter in wrong if parameter == name} == levels


def test_a_parameter_without_a_gradient_has_to_stay(clipped: Reference) -> None:
    step = clipped.eager.steps[1]
    none: dict[str, Any] = {"gradients": {**step.gradients, NAME: None}, "final": {**step.final, NAME: None}}
    kept = {**step.state, NAME: clipped.eager.starts[1][NAME]}
    eager = changed(clipped.eager, **none, state=kept)
    reference = standing_in(clipped, eager=eager)
    right = changed(clipped.again, **none, state=kept)
    assert wrong_of(climb(reference, right)) == set()
    moved = changed(clipped.again, **none)
    assert wrong_of(climb(reference, moved)) == {("L0", PARAMETER + NAME)}


def standing_in(reference: Reference, **changes: Any) -> Any:
    """A reference like another one."""
    other = copy.copy(reference)
    vars(other).update(changes)
    return other


def bench_like(bench: Bench, **changes: Any) -> Any:
    """A bench of which a ladder asks no more than who judges what, and what failed."""
    known: dict[str, Any] = {"unevaluated": "", "not_taken": {}, "failures": [], "stalled": ""}
    return SimpleNamespace(**{"ranks": bench.ranks, "subject": bench.subject, **known, **changes})


def test_what_eager_does_not_reproduce_is_judged_by_its_own_spread(clipped: Reference) -> None:
    noisy = standing_in(clipped, unstable=frozenset([NAME]))
    gradient = clipped.again.steps[1].gradients[NAME]
    assert gradient is not None
    for factor, wrong in ((1 + 2**-22, set()), (1.01, {("L2", NAME)})):
        gradients = {**clipped.again.steps[1].gradients, NAME: gradient * factor}
        sheet = climb(noisy, changed(clipped.again, gradients=gradients))
        assert wrong_of(sheet) == wrong
        assert sheet.notes[0].startswith(f"eager itself does not reproduce {NAME}; judged at L2")


def evaluating(record: Record, factor: float) -> Record:
    """The same run, with an evaluation in its second step."""
    extras = {**record.steps[1].extras, "evaluated": torch.ones(3) * factor}
    return changed(record, extras=extras)


def test_what_only_ddp_broadcasts_is_compared_on_rank_0_and_named_on_others(clipped: Reference) -> None:
    state = clipped.again.steps[1].state
    buffer = "between.running_mean"
    moved = changed(clipped.again, state={**state, buffer: next_up(state[buffer])})
    record, eager = evaluating(moved, 1.01), evaluating(clipped.eager, 1)
    names = {f"buffer {buffer}", "the evaluated"}
    others = standing_in(
        clipped,
        eager=eager,
        bench=bench_like(clipped.bench, ranks=replace(clipped.bench.ranks, rank=1)),
        eager_peers=[*clipped.eager_peers, *clipped.eager_peers],
    )
    for reference, how in ((standing_in(clipped, eager=eager), "local"), (others, "whole")):
        assert wrong_of(climb(reference, record, how=how)) == {("L0", name) for name in names}
    sheet = climb(others, record, how="local")
    assert wrong_of(sheet) == set()
    assert names <= set(sheet.about[OTHER_BUFFERS])
    assert LOSS not in sheet.about[OTHER_BUFFERS]


# ----------------------------------------------------------------------------- another order of summation


def cut(record: Record) -> Record:
    """The same, of a graph that is cut, as far as a ladder looks."""
    return replace(record, graphs=("0/0",), plan=cast(Plan, SimpleNamespace(cuts=("cut",))))


def with_gradient(record: Record, factor: float, step: int) -> Record:
    gradients = record.steps[step].gradients
    gradient = gradients[NAME]
    assert gradient is not None
    return changed(record, step, gradients={**gradients, NAME: gradient * factor})


def test_gradients_of_a_cut_graph_alone_are_judged_by_rounding_if_unequal(clipped: Reference) -> None:
    moved = cut(with_gradient(clipped.again, 1 + 2**-22, 0))
    sheet = climb(clipped, moved)
    assert wrong_of(sheet) == set()
    assert sheet.about[RESUMMED] == {NAME: None}
    levels = {(item.measured.parameter, item.measured.level) for item in sheet.judged}
    assert {(NAME, "L2"), (OTHER, "L0"), (LOSS, "L0")} <= levels
    assert (NAME, "L0") not in levels
    step = moved.steps[0]
    other = step.gradients[OTHER]
    assert other is not None
    others: list[tuple[dict[str, Any], set[tuple[str, str]]]] = [
        ({"loss": scaled(step.loss, 1 + 2**-22)}, {("L0", LOSS)}),
        ({"gradients": {**step.gradients, OTHER: other * 1.01}}, {("L2", OTHER)}),
        ({"state": {**step.state, OTHER: next_up(step.state[OTHER])}}, {("L0", PARAMETER + OTHER)}),
    ]
    for changes, wrong in others:
        assert wrong_of(climb(clipped, changed(moved, 0, **changes))) == wrong


def test_gradients_of_a_graph_that_is_not_cut_have_to_be_equal(clipped: Reference) -> None:
    moved = with_gradient(clipped.again, 1 + 2**-22, 0)
    uncompiled = replace(cut(moved), graphs=())
    for record in (moved, replace(moved, graphs=("0/0",)), uncompiled):
        assert wrong_of(climb(clipped, record)) == {("L0", NAME), ("L1", NAME)}
    assert wrong_of(climb(clipped, replace(moved, graphs=("0/0",)), how="torch")) == set()


def test_from_three_ranks_on_another_order_of_summation_is_judged_by_rounding_too(clipped: Reference) -> None:
    record = with_gradient(clipped.again, 1 + 2**-20, 0)
    assert wrong_of(climb(clipped, record, ordered=False)) == {("L1", NAME)}
    assert wrong_of(climb(clipped, cut(record), ordered=False)) == set()
    worse = cut(with_gradient(clipped.again, 1.01, 0))
    assert wrong_of(climb(clipped, worse, ordered=False)) == {("L2", NAME)}


# --------------------------------------------------------------------------------------- from end to end


class Unordered(nn.Module):
    """Layers whose order is neither that of their registration nor the reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third, self.first, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        return self.last(self.third(self.second(self.first(x))))


def test_the_gradient_that_is_wrong_first_in_backward_is_told_first(alone: Ranks) -> None:
    def skew(trainer: Trainer) -> None:
        third: Any = trainer.parallel.model.get_submodule("third")
        third.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 1.01,))

    case = Case("unordered", Unordered, lambda rank, step: ((torch.ones(2, 4),), {}), "x")
    with closing(Bench(Subject(case, option("default"), 1, alone.device), alone)) as bench:
        reference = Reference.make(bench)
        assert reference is not None
        trial = judge(reference, mode("eager"), None, tamper=skew)
    layers = dict.fromkeys(str(found.parameter).partition(".")[0] for found in trial.findings)
    assert list(layers)[:3] == ["third", "second", "first"]


def test_a_backend_that_returns_no_output_is_wrong_and_not_a_refusal(clipped: Reference) -> None:
    trial = judge(clipped, mode("whole"), lambda gm, _: lambda *args: [None for _ in gm.forward(*args)])
    assert (trial.status, [found.level for found in trial.findings]) == (Status.WRONG, ["run"])
    assert "expected a floating-point tensor in the model's output" in trial.findings[0].message


REFUSAL = UnsupportedError("own trains on the default group of 4 ranks only, got one of 2")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (REFUSAL, Status.REFUSED),
        # an engine may not excuse itself: not by ddpopt's type of error, and not by a fault of its own
        (UnsupportedError("no buckets to plan"), Status.WRONG),
        (AttributeError("'Scout' object has no attribute 'step'"), Status.WRONG),
    ],
)
def test_only_what_is_documented_is_refused(error: Exception, status: Status, clipped: Reference) -> None:
    def refusing(*_: object) -> Any:
        raise error

    trial = judge(clipped, Engine(prepare=refusing, compiles=True), "eager")
    assert trial.status is status
    said = trial.reason or trial.findings[0].message
    assert f"{type(error).__name__}: {error}" in said
