"""Cases, the targets that name them, and what every case of the corpus promises."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddpopt.errors import UsageError
from ddpopt.testing import Case, corpus, mean_square, resolve, step_seed

# Dynamo reads .grad of graph inputs that are no leaves, and makes an instance of a traced autograd function.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]
MIB = 2**20
# Those that Dynamo might not capture as one graph; tests/multigpu compiles them all.
ALL = pytest.mark.parametrize("case", corpus.cases(), ids=lambda case: case.name)


def gradients(case: Case, rank: int = 0, step: int = 0) -> dict[str, Tensor | None]:
    """Run forward and backward of a new model in eager."""
    model = case.model()
    case.step(model, rank, step).backward()  # type: ignore[no-untyped-call]  # as in torch
    named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return {name: grad.to_dense() if grad is not None else None for name, grad in named}


def equal(left: Tensor | None, right: Tensor | None) -> bool:
    """Compare two gradients bit by bit; None equals only None."""
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)


def tensors(case: Case, rank: int, step: int) -> list[Tensor]:
    """Return the tensors among a case's inputs."""
    return [leaf for leaf in tree_leaves(case.inputs(rank, step)) if isinstance(leaf, Tensor)]


# ------------------------------------------------------------------------------------------- every case


def test_names_are_unique() -> None:
    names = [case.name for case in corpus.cases()]
    assert len(set(names)) == len(names)


def test_every_case_says_in_one_line_what_it_exercises() -> None:
    abouts = [case.about for case in corpus.cases()]
    assert [about for about in abouts if not about or "\n" in about or about.endswith(".")] == []


def test_tags_are_those_that_the_corpus_explains() -> None:
    assert corpus.__doc__ is not None
    tags = [tag for case in corpus.cases() for tag in case.tags]
    assert [tag for tag in tags if f"``{tag}``" not in corpus.__doc__] == []


@ALL
def test_gradients_repeat_bit_by_bit_and_all_but_the_declared_ones_are_there_and_finite(case: Case) -> None:
    first, again = gradients(case), gradients(case)
    other = gradients(case, 1) if case.unused else first  # experts may be unused on some ranks only
    assert [name for name in first if not equal(first[name], again[name])] == []
    missing = {name for rank in (first, other) for name, grad in rank.items() if grad is None}
    assert missing == set(case.unused)
    found = [grad for rank in (first, other) for grad in rank.values() if grad is not None]
    assert all(bool(torch.isfinite(grad).all()) for grad in found)


@ALL
def test_every_rank_and_step_has_inputs_of_its_own(case: Case) -> None:
    first = tensors(case, 0, 0)
    assert all(map(torch.equal, first, tensors(case, 0, 0)))
    for other in (tensors(case, 1, 0), tensors(case, 0, 1)):
        assert not all(map(torch.equal, first, other))


@ALL
def test_building_a_model_leaves_the_default_generator_alone(case: Case) -> None:
    before = torch.random.get_rng_state()
    case.model()
    case.inputs(0, 0)
    assert torch.equal(before, torch.random.get_rng_state())


@ALL
def test_caps_up_to_2_5_mib_give_several_buckets(case: Case) -> None:
    ignored = getattr(case.model(), "_ddp_params_and_buffers_to_ignore", ())
    named = case.model().named_parameters()
    params: list[Tensor] = [param for name, param in named if param.requires_grad and name not in ignored]
    default = [0.3, 1, 2.5]
    own = case.ddp_kwargs.get("bucket_cap_mb_list", [case.ddp_kwargs.get("bucket_cap_mb", 2.5)])
    for limits in (own, *([cap] for cap in default)):
        sizes = [int(cap * MIB) for cap in limits]
        buckets, _ = torch._C._distributed_c10d._compute_bucket_assignment_by_size(params, sizes)
        assert len(buckets) > 1


@ALL
def test_a_case_survives_pickling_into_another_process(case: Case) -> None:
    copy = pickle.loads(pickle.dumps(case))
    assert copy.name == case.name
    assert all(map(torch.equal, copy.model().parameters(), case.model().parameters()))


def test_an_unknown_case_is_answered_with_the_names_that_exist() -> None:
    with pytest.raises(UsageError) as caught:
        corpus.case("gtp")
    names = ", ".join(case.name for case in corpus.cases())
    assert str(caught.value) == f"expected the name of a case in the corpus, got 'gtp'; there are: {names}"


# ------------------------------------------------------------------------------------------------ loss


def test_the_default_loss_is_the_mean_over_all_elements_of_all_floating_outputs() -> None:
    output = {"a": torch.tensor([1.0, 2.0]), "b": [torch.tensor([3 + 4j]), None, 7, torch.tensor([100])]}
    assert mean_square(output).item() == (1 + 4 + 9 + 16) / 4  # a complex element is two real ones


def test_the_default_loss_sums_half_precision_in_float32() -> None:
    assert mean_square(torch.full((4,), 300.0, dtype=torch.float16)).item() == 90000.0


def test_the_default_loss_refuses_an_output_without_floats() -> None:
    with pytest.raises(UsageError) as caught:
        mean_square({"ids": torch.tensor([1])})
    assert str(caught.value) == (
        "expected a floating-point tensor in the model's output, got dict without one; "
        "return one, or give the case a loss"
    )


def test_a_step_draws_the_same_dropout_again() -> None:
    case = corpus.case("dropout")
    model = case.model()
    assert torch.equal(case.step(model, 1, 3), case.step(model, 1, 3))


# --------------------------------------------------------------------------------------------- targets


def pair() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Linear(3, 2), (torch.randn(4, 3),)


def triple() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    return nn.Bilinear(3, 3, 2), (torch.randn(4, 3),), {"input2": torch.randn(4, 3)}


def keywords() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(3, 2), {"input": torch.randn(4, 3)}


def single() -> tuple[nn.Module, Tensor]:
    return nn.Linear(3, 2), torch.randn(4, 3)


def whole_case() -> Case:
    return corpus.case("gpt")


@pytest.mark.parametrize("factory", [pair, triple, keywords, single])
def test_a_factory_becomes_a_case_that_repeats_and_differs_per_rank(factory: Callable[[], object]) -> None:
    case = resolve(factory)
    first, again, other = (gradients(case, rank) for rank in (0, 0, 1))
    assert all(equal(first[name], again[name]) for name in first)
    assert not any(equal(first[name], other[name]) for name in first if "weight" in name)


def test_a_factory_leaves_the_default_generator_alone() -> None:
    before = torch.random.get_rng_state()
    case = resolve(pair)
    case.model()
    case.inputs(1, 1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_case_and_what_leads_to_a_case_resolve_to_it() -> None:
    gpt = corpus.case("gpt")
    assert resolve(gpt) is gpt
    assert resolve(whole_case).name == "gpt"
    assert resolve("gpt").name == "gpt"


def test_a_target_is_named_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    (tmp_path / "models_of_mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    case = resolve("models_of_mine:make")
    assert case.name == "models_of_mine:make"
    assert case.about == "made by models_of_mine:make"


def returns_model() -> nn.Module:
    return nn.Linear(1, 1)


def returns_swapped() -> tuple[Tensor, nn.Module]:
    return torch.ones(1), nn.Linear(1, 1)


def returns_list_of_kwargs() -> tuple[nn.Module, tuple[()], list[int]]:
    return nn.Linear(1, 1), (), [1]


def raises() -> object:
    raise ValueError("no such size: 0")


HERE = __name__
RETURNS = "expected it to return (model, inputs), (model, args, kwargs) or a ddpopt.testing.Case"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (3, "expected a target that is a string, a Case or a callable, got 3"),
        (returns_model, f"target '{HERE}:returns_model': {RETURNS}, got Linear"),
        (returns_swapped, f"target '{HERE}:returns_swapped': {RETURNS}, got (Tensor, Linear)"),
        (
            returns_list_of_kwargs,
            f"target '{HERE}:returns_list_of_kwargs': {RETURNS}, got (Linear, tuple, list)",
        ),
        (
            raises,
            f"target '{HERE}:raises': calling it without arguments failed: ValueError: no such size: 0",
        ),
        (
            "ddpopt.testing:",
            "expected a target like 'package.module:name', got 'ddpopt.testing:'; "
            "give 'package.module:name', or the name of a case in ddpopt.testing.corpus",
        ),
        (
            "no_such_package.models:make",
            "target 'no_such_package.models:make': there is no module 'no_such_package'; "
            "install it, or add the directory that holds it to PYTHONPATH",
        ),
        (
            "ddpopt.testing.models:make",
            "target 'ddpopt.testing.models:make': there is no module 'ddpopt.testing.models'; "
            "install it, or add the directory that holds it to PYTHONPATH",
        ),
        (
            "ddpopt.testing:make",
            "target 'ddpopt.testing:make': module 'ddpopt.testing' has no attribute 'make'",
        ),
        (
            "ddpopt.testing.corpus.decoders:CASES",
            "target 'ddpopt.testing.corpus.decoders:CASES': expected a Case or a callable without arguments, "
            "got tuple; make it a function that returns "
            "(model, inputs), (model, args, kwargs) or a ddpopt.testing.Case",
        ),
    ],
)
def test_a_target_that_cannot_be_used_is_answered_with_what_to_do(target: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(target)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_package", "importing 'broken_models' failed: No module named 'no_such_package'"),
        ("1 / 0", "importing 'broken_models' failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_to_import_is_told_from_one_that_is_missing(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve("broken_models:make")
    assert str(caught.value) == f"target 'broken_models:make': {message}"
    assert caught.value.__cause__ is not None


def test_seeds_do_not_collide_between_ranks_and_steps() -> None:
    seeds = [step_seed(rank, step) for rank in range(64) for step in range(64)]
    assert len(set(seeds)) == len(seeds)
