"""ddpopt.judge.rules.rounding: one rounding perturbs eager, and what it leaves is learned."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddpopt.cases import corpus
from ddpopt.cases.matrix import CASES
from ddpopt.cases.option_cases import in_dtype
from ddpopt.judge.compare import Sum, ulps
from ddpopt.judge.rules.rounding import SAMPLES, learned, neighbor, perturbed, perturbed_state, widened
from ddpopt.judge.training.record import Record, RecordedStep

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_moves_to_one_of_its_two_neighbors(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=generator()).to(dtype)
    moved = neighbor(values, generator())
    up, down = moved > values, moved < values
    assert bool((up | down).all())
    assert min(int(up.sum()), int(down.sum())) > 400
    assert ulps(moved, values) == 1.0
    eps = torch.finfo(dtype).eps
    assert set(neighbor(torch.ones(100, dtype=dtype), generator()).tolist()) == {1 + eps, 1 - eps / 2}


def test_the_unit_is_that_of_the_dtype_that_is_computed_in() -> None:
    values = torch.randn(1000, generator=generator()).to(torch.bfloat16)
    moved = neighbor(values.float(), generator(), torch.bfloat16)
    assert ulps(moved.to(torch.bfloat16), values) == 1.0
    assert torch.equal(moved.to(torch.bfloat16).float(), moved)
    assert torch.equal(neighbor(values, generator(), torch.float32), neighbor(values, generator()))


def test_zeros_and_what_is_not_finite_stay() -> None:
    odd = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    assert torch.equal(neighbor(odd, generator()), odd)
    largest = torch.full((50,), torch.finfo(torch.float32).max)
    assert bool(neighbor(largest, generator()).isfinite().all())
    assert bool(neighbor(torch.full((5,), float("nan")), generator()).isnan().all())


def test_complex_numbers_move_in_both_parts_and_others_not_at_all() -> None:
    values = torch.randn(50, generator=generator(), dtype=torch.complex64)
    moved = neighbor(values, generator())
    assert bool((moved.real != values.real).all())
    assert bool((moved.imag != values.imag).all())
    counts = torch.arange(5)
    assert neighbor(counts, generator()) is counts
    assert neighbor("word", generator()) == "word"
    trained = neighbor(torch.ones(3, requires_grad=True), generator())
    assert (trained.requires_grad, trained.is_leaf) == (True, True)


def test_runs_are_perturbed_in_different_ways_and_each_repeats() -> None:
    (first,), _ = perturbed(CASES[0], 1, None).inputs(0, 0)
    (again,), _ = perturbed(CASES[0], 1, None).inputs(0, 0)
    (other,), _ = perturbed(CASES[0], 2, None).inputs(0, 0)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    state = {"w": torch.ones(100)}
    assert not torch.equal(perturbed_state(state, 1, None)["w"], perturbed_state(state, 2, None)["w"])


# ---------------------------------------------------------------------------------------- what is learned


def record_of(gradient: Tensor, start: Tensor, change: float = -0.5) -> Record:
    state = {"w": start + change}
    extras = {"norm": gradient.norm()}
    step = RecordedStep("step 0", gradient.sum(), {"w": gradient}, state, torch.zeros(0), extras)
    return Record({"w": start}, steps=[replace(step, final={"w": gradient / 2}, late=frozenset({"norm"}))])


RUNS = [record_of(torch.ones(4) + 1e-7 * i, torch.ones(4) + 0.1 * i) for i in range(SAMPLES)]
TRUTH = record_of(torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))


def test_everything_that_a_step_leaves_is_learned_but_what_its_gradient_explains() -> None:
    (known,) = learned(RUNS, TRUTH)
    assert set(known) == {"w", "final gradient of w", "the loss", "the norm"}


def test_a_parameter_that_something_else_writes_to_is_learned_from_where_eager_began() -> None:
    (known,) = learned(RUNS, TRUTH, written={"w"})
    # the starts lie far apart, the changes do not
    assert known["parameter w"].mean_square < 1e-6
    assert torch.equal(known["parameter w"].truth, torch.full((4,), 0.5, dtype=torch.float64))


def test_what_eager_does_not_reproduce_is_learned_from_its_runs_alone() -> None:
    truth = record_of(torch.full((4,), 1 + 5e-7, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    (known,) = learned(RUNS, truth, unstable={"w"})
    assert known["w"].note == "no float64 reference"
    assert known["the loss"].note == ""


def test_the_terms_of_a_gradient_are_known_and_of_nothing_else() -> None:
    terms = {"w": Sum(torch.full((4,), 2.0), torch.full((4,), 2e3), 2, torch.full((4,), 2.0))}
    (known,) = learned(RUNS, TRUTH, [terms])
    assert float(known["w"].floor.max()) > 1e-5
    assert float(known["final gradient of w"].floor.max()) < 1e-6


def test_in_float64_complex_numbers_keep_both_parts() -> None:
    case = corpus.case("complex")
    wide = in_dtype(case, torch.float64)
    narrow = {name: parameter.detach() for name, parameter in case.model().named_parameters()}
    assert any(parameter.is_complex() for parameter in narrow.values())
    found, state = dict(wide.model().named_parameters()), widened(narrow)
    for name, parameter in narrow.items():
        assert torch.equal(found[name].detach(), parameter.to(found[name].dtype))
        assert torch.equal(found[name].detach(), state[name])
        assert torch.finfo(found[name].dtype).eps == torch.finfo(torch.float64).eps


def test_integer_data_is_not_changed_because_it_may_be_a_mask_or_indices() -> None:
    values = torch.tensor([0.0, 1.0, -3.0, 0.5, 1e-3])
    moved = neighbor(values, generator(), data=True)
    assert (moved != values).tolist() == [False, False, False, True, True]
