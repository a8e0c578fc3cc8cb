"""ddpopt.judge.trajectory: what adds up over many steps is found, and rounding is not called wrong."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from ddpopt.cases import corpus
from ddpopt.cases.case import Case
from ddpopt.cases.matrix import CASES
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trajectory.free import FreeRuns, free_runs
from ddpopt.judge.trials.following import follow
from ddpopt.judge.trials.on_rank import STEPS
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks
from tests.selftest.cells import CASE, LATE, LATE_ROWS, Cell, cells, engine_of
from tests.selftest.engines import Averaging

FREE = 10
NIGHT = pytest.mark.nightly
CLEAN = (
    "llama", "rnn_cell", "keyword", "weight_norm", "shared_module", "unused_static", "checkpoint", "tied",
    "views_in_place", "tp_attention", "donated_buffers", "uneven_ranks", "resnet", "cap_below_1", "buffers",
    "dropout", "scalars", "autocast", "frozen", "in_place",
)  # fmt: skip
"""Cases that Inductor computes with other roundings than eager, or in another order."""
CELLS = {
    True: [*cells(LATE_ROWS)],
    False: [cell for cell in cells(LATE_ROWS) if cell.how != "last bit"],  # that is rounding
}
"""By whether an engine must be equal bit for bit."""


@contextmanager
def eager(ranks: Ranks, case: Case, name: str = "default", steps: int = FREE) -> Iterator[FreeRuns]:
    bench = Bench(Subject(case, option(name), STEPS, ranks.device, evaluates=False), ranks)
    reference = Reference.make(bench)
    assert reference is not None, bench.failures
    with free_runs(reference, steps) as runs:
        yield runs
    bench.close()


def trial_of(runs: FreeRuns, engine: Engine, backend: object = None) -> Trial:
    case, name = runs.reference.bench.subject.case.name, runs.reference.bench.subject.option.name
    return follow(runs, engine, backend, Trial(case, engine.name, name, str(backend or ""), Status.OK))


def test_rounding_is_within_the_envelope_and_said_to_be(ranks: Ranks) -> None:
    with eager(ranks, CASES[0]) as runs:
        trial = trial_of(runs, Rounding())
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
    assert trial.notes[0].startswith(f"within rounding in all of {FREE} steps: at most ")
    assert {"the loss"} < {drift.name for drift in trial.drifts}
    assert all(len(drift.distances) == len(drift.bounds) == FREE for drift in trial.drifts)


def is_late(cell: Cell) -> bool:
    return cell.when.endswith("late")


def missed(runs: FreeRuns, chosen: Sequence[Cell], *, exact: bool) -> list[str]:
    """The cells that are called right, or wrong from another step on."""
    found = []
    for cell in chosen:
        trial = trial_of(runs, engine_of(cell, exact=exact))
        steps = [finding.step for finding in trial.findings]
        if trial.status is not Status.WRONG or (is_late(cell) and steps != [LATE]):
            found.append(f"{cell}: {trial.status} {trial.reason} {steps} {trial.notes}")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("exact", [True, False])
def test_a_right_engine_is_right_and_each_cell_of_a_sample_is_found(ranks: Ranks, exact: bool) -> None:
    with eager(ranks, CASE) as runs:
        trial = trial_of(runs, engine_of(None, exact=exact))
        assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
        assert trial.notes[0] == f"equal to eager DDP, bit for bit, in all of {FREE} steps"
        assert missed(runs, CELLS[exact][::16], exact=exact) == []


@NIGHT
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("exact", [True, False])
def test_each_cell_is_found(ranks: Ranks, exact: bool) -> None:
    with eager(ranks, CASE) as runs:
        assert missed(runs, CELLS[exact], exact=exact) == []


@pytest.mark.parametrize(
    "name",
    ["ddpopt-split", "ddpopt-inline", *(pytest.param(n, marks=NIGHT) for n in ("eager", "torch", "zero"))],
)
def test_a_mode_is_equal_to_eager_at_every_step_with_scheduled_and_averaged_weights(
    ranks: Ranks, name: str
) -> None:
    with eager(ranks, CASES[0], "scheduled") as runs:
        trial = trial_of(runs, mode(name), "aot_eager")
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")
    assert trial.notes[0] == f"equal to eager DDP, bit for bit, in all of {FREE} steps"
    assert "optimizer state average of layers.0.weight" in {seen.parameter for seen in trial.measured}


@NIGHT
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CLEAN)
def test_rounding_of_inductor_is_not_called_wrong(ranks: Ranks, name: str) -> None:
    with eager(ranks, corpus.case(name), steps=20) as runs:
        trial = trial_of(runs, mode("ddpopt-inline"), "inductor")
    assert (trial.status, trial.findings, trial.reason) == (Status.OK, (), "")


class Chaotic(nn.Module):
    """A logistic map of its parameters, which amplifies what rounding leaves by 2 in each of many turns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.9, 8))

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor = self.weight
        for _ in range(40):
            state = 3.99 * state * (1 - state)
        return state * x


class Rounding(Averaging):
    """A right engine, each of whose gradients is one unit in the last place off."""

    name = "rounding"
    exact = False

    def mean(self, gradient: Tensor) -> None:
        super().mean(gradient)
        gradient.copy_(torch.nextafter(gradient, torch.full_like(gradient, torch.inf)))


def some_rows(rank: int, step: int) -> tuple[tuple[Tensor], dict[str, object]]:
    return (torch.randn(8, generator=torch.Generator().manual_seed(2 * step + rank)),), {}


def test_of_a_chaotic_model_nothing_is_said_and_that_is_never_right(ranks: Ranks) -> None:
    case = Case("chaotic", Chaotic, some_rows, "a logistic map")
    with eager(ranks, case, steps=3) as runs:
        trial = trial_of(runs, Rounding())
        assert trial_of(runs, Averaging("equal")).status is Status.OK
    assert trial.status is Status.BROKEN
    assert "nothing can be said of any gradient or parameter" in trial.reason
    assert trial.findings == ()


class Late(Averaging):
    """A right engine, but for its backwards from a step on."""

    def __init__(self, spoil: Callable[[nn.Parameter], None]) -> None:
        super().__init__("late")
        self.spoil = spoil
        self.count = 0

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.count += 1
        if self.count > LATE:
            self.spoil(next(iter(self.model.parameters())))


def lose(parameter: nn.Parameter) -> None:
    parameter.grad = None


def scale(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad *= 1.01


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lose, "eager DDP has one, of that shape and dtype, and this run has not", marks=NIGHT),
        (scale, "factor that all elements have in common, off 1 by 0.01, where rounding explains"),
    ],
)
def test_a_finding_names_step_number_and_whether_one_step_is_wrong(
    ranks: Ranks, spoil: Callable[[nn.Parameter], None], words: str
) -> None:
    engine = Late(spoil)
    engine.exact = False
    with eager(ranks, CASES[0], "adamw_foreach") as runs:
        trial = trial_of(runs, engine)
    (finding,) = trial.findings
    assert (finding.level, finding.step, finding.parameter) == ("L2", LATE, "layers.0.weight")
    assert finding.message.startswith(
        f"from step {LATE} on: the gradient of layers.0.weight, step {LATE}, rank"
    )
    assert words in finding.message
    assert (
        "one step from eager's state before it is right, so the error is in what earlier" in finding.message
    )
