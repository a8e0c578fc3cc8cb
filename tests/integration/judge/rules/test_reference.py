"""ddpopt.judge.rules.reference: what eager does twice, what ranks contribute, where that is summed."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpopt.cases.case import Case
from ddpopt.cases.matrix import CASES
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.outcome import NO_GRADIENTS
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.moments import EXTRAS
from ddpopt.judge.training.options import option
from ddpopt.judge.trials import on_rank as trials
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.trials.on_rank import Request, Settings, run_trials
from ddpopt.judge.verdict import Status
from ddpopt.ranks.group import Ranks


class Small(nn.Module):
    """Two layers; what happens between them is up to the case."""

    def __init__(self, between: Callable[["Small", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.last(self.between(self, hidden))


Between = Callable[[Any, Tensor], Tensor]


@contextmanager
def bench_of(alone: Ranks, between: Between) -> Iterator[Bench]:
    case = Case("small", lambda: Small(between), lambda rank, step: ((torch.ones(2, 4),), {}), "small")
    with closing(Bench(Subject(case, option("default"), 2, alone.device), alone)) as bench:
        yield bench


def reference_of(alone: Ranks, between: Between) -> Reference:
    with bench_of(alone, between) as bench:
        found = Reference.make(bench)
    assert found is not None
    return found


def noise() -> Tensor:
    free = torch.Generator()
    free.seed()
    return torch.rand(4, generator=free)


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_or_an_evaluation_that_does_not_repeat_is_seen(alone: Ranks, training: bool) -> None:
    found = reference_of(alone, lambda model, x: x + noise() if model.training is training else x)
    trained = {"the loss", "last.weight", "first.weight"}
    outputs = {f"the {name}'s output" for name in ("first evaluation", "evaluation", "inference")}
    evaluated = outputs | {f"{name} after the step" for name in outputs}
    of_steps = {name for name in found.unstable if not name.startswith(tuple(EXTRAS))}
    assert trained <= of_steps if training else of_steps == evaluated


def test_a_model_that_cannot_be_evaluated_is_trained_all_the_same(alone: Ranks) -> None:
    def training_alone(model: Any, x: Tensor) -> Tensor:
        if not model.training:
            raise RuntimeError("no evaluation here")
        return x

    found = reference_of(alone, training_alone)
    assert "no evaluation here" in found.bench.unevaluated
    assert (len(found.eager.steps), found.eager.evaluation) == (2, None)


def test_where_no_gradient_is_a_number_nothing_is_judged_right(alone: Ranks) -> None:
    reference = reference_of(alone, lambda _, x: x * float("nan"))
    trial = judge(reference, mode("eager"), None)
    assert (trial.status, trial.reason) == (Status.NOT_POSSIBLE, NO_GRADIENTS)


def test_a_parameter_that_the_forward_writes_to_is_distinguished_from_the_others(alone: Ranks) -> None:
    def scaling(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.first.bias.mul_(0.5)
        return x

    assert reference_of(alone, scaling).written == {"first.bias"}


def test_sums_count_none_and_what_has_lost_elements_as_zeros(alone: Ranks) -> None:
    like = {name: torch.zeros(2, 2) for name in ("whole", "none", "cut")}
    with bench_of(alone, lambda model, x: x) as bench:
        sums = bench.sums({"whole": -torch.ones(2, 2), "none": None, "cut": torch.ones(3)}, like)
    assert sums["whole"].total.tolist() == [[-1, -1], [-1, -1]]
    assert sums["whole"].magnitude.tolist() == [[1, 1], [1, 1]]
    assert sums["none"].magnitude.tolist() == sums["cut"].magnitude.tolist() == [[0, 0], [0, 0]]


def test_a_run_that_leaves_gradients_off_does_not_disturb_the_next_one(alone: Ranks) -> None:
    def leaving_them_off(model: Any, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x

    with bench_of(alone, leaving_them_off) as bench:
        assert Reference.make(bench) is None
    assert torch.is_grad_enabled()
    assert reference_of(alone, lambda model, x: x.relu()).unstable == frozenset()


def test_a_trial_that_raises_leaves_no_process_group(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ValueError("no judgement")

    monkeypatch.setattr(trials, "judge", failing)
    with pytest.raises(ValueError, match="no judgement"):
        run_trials(alone, [Request(CASES[0], "default", ("whole",))], Settings("eager", steps=1), ())
    c10d: Any = dist  # private: torch counts its groups nowhere else
    assert len(c10d.distributed_c10d._world.pg_map) == 1
