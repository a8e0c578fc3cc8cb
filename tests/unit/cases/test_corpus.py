"""Cases, and the targets that name them."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpopt.cases import corpus
from ddpopt.errors import UsageError
from ddpopt.testing import Case, mean_square, resolve
from tests.support.refusals import refusal

# ------------------------------------------------------------------------------------------------ names


def test_an_unknown_case_is_rejected_with_names_like_it_and_the_command_that_lists_all() -> None:
    assert refusal(lambda: corpus.case("gtp")) == (
        "expected the name of a case in the corpus, got 'gtp'; 'ddpopt cases' lists them, and a function of "
        "your own is package.module:name; did you mean 'gpt'?"
    )


# ------------------------------------------------------------------------------------------------ loss


def test_the_default_loss_is_the_mean_over_all_elements_of_all_floating_outputs_in_float32() -> None:
    output = {"a": torch.tensor([1.0, 2.0]), "b": [torch.tensor([3 + 4j]), None, 7, torch.tensor([100])]}
    assert mean_square(output).item() == (1 + 4 + 9 + 16) / 4  # a complex element is two real ones
    assert mean_square(torch.full((4,), 300.0, dtype=torch.float16)).item() == 90000.0


def test_the_default_loss_refuses_an_output_without_floats() -> None:
    assert refusal(lambda: mean_square({"ids": torch.tensor([1])})) == (
        "expected a floating-point tensor in the model's output, got dict without one; "
        "return one, or give the case a loss"
    )


# --------------------------------------------------------------------------------------------- targets


def pair() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Linear(3, 2), (torch.randn(4, 3),)


def triple() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    return nn.Bilinear(3, 3, 2), (torch.randn(4, 3),), {"input2": torch.randn(4, 3)}


def keywords() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(3, 2), {"input": torch.randn(4, 3)}


def single() -> tuple[nn.Module, Tensor]:
    return nn.Linear(3, 2), torch.randn(4, 3)


def weight_gradients(case: Case, rank: int) -> list[Tensor]:
    """Run forward and backward of a new model in eager."""
    model = case.model()
    case.step(model, rank, 0).backward()  # type: ignore[no-untyped-call]  # as in torch
    return [p.grad for name, p in model.named_parameters() if "weight" in name and p.grad is not None]


@pytest.mark.parametrize("factory", [pair, triple, keywords, single])
def test_a_factory_becomes_a_case_that_repeats_and_differs_per_rank(factory: Callable[[], object]) -> None:
    before = torch.random.get_rng_state()
    case = resolve(factory)
    case.model()
    case.inputs(1, 1)
    assert torch.equal(before, torch.random.get_rng_state())
    first, again, other = (weight_gradients(case, rank) for rank in (0, 0, 1))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_a_case_and_what_leads_to_a_case_resolve_to_it() -> None:
    gpt = corpus.case("gpt")
    assert resolve(gpt) is gpt
    assert resolve(lambda: gpt).name == "gpt"
    assert resolve("gpt").name == "gpt"
    assert (resolve(f"{HERE}:pair").name, resolve(pair).name) == (f"{HERE}:pair", f"{HERE}:pair")


def returns_swapped() -> tuple[Tensor, nn.Module]:
    return torch.ones(1), nn.Linear(1, 1)


def raises() -> object:
    raise ValueError("no such size: 0")


def leaves() -> Any:
    sys.exit(0)


def line_of(function: Any) -> str:
    code = inspect.getsourcelines(function)[0][1].strip()
    return f"({__file__}:{function.__code__.co_firstlineno + 1} in {function.__name__}: {code})"


MODEL_LEAVES = Case("leaving", leaves, lambda rank, step: ((), {}), "its model ends the process")
HERE = __name__
CALLED = "calling it without arguments failed: "
INSTALL = "install it, or add the directory that contains it to PYTHONPATH"
RETURNS = "expected it to return (model, inputs), (model, args, kwargs) or a ddpopt.testing.Case"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (3, "expected a target that is a string, a Case or a callable, got 3"),
        (
            "ddpopt.testing:",
            "expected a target like 'package.module:name', got 'ddpopt.testing:'; "
            "give 'package.module:name', or the name of a case ('ddpopt cases' lists them)",
        ),
        (returns_swapped, f"{RETURNS}, got (Tensor, Linear)"),
        (raises, f"{CALLED}ValueError: no such size: 0 {line_of(raises)}"),
        (leaves, f"{CALLED}SystemExit: 0 {line_of(leaves)}"),
        (f"{HERE}:MODEL_LEAVES", f"making its model failed: SystemExit: 0 {line_of(leaves)}"),
        ("no_such_package.models:make", f"there is no module 'no_such_package'; {INSTALL}"),
        ("ddpopt.testin:make", f"there is no module 'ddpopt.testin'; {INSTALL}; did you mean 'testing'?"),
        (f"{HERE}:singl", f"module {HERE!r} has no attribute 'singl'; did you mean 'single'?"),
        (
            "ddpopt.cases.corpus.decoders:CASES",
            "expected a Case or a callable without arguments, got tuple; make it a function that returns "
            "(model, inputs), (model, args, kwargs) or a ddpopt.testing.Case",
        ),
    ],
)
def test_an_unusable_target_is_rejected_with_what_to_do(target: Any, message: str) -> None:
    name = f"{HERE}:{target.__name__}" if callable(target) else target
    named = "" if message.startswith("expected a target ") else f"target {name!r}: "
    assert refusal(lambda: resolve(target)) == f"{named}{message}"


BROKEN = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "import sys; sys.exit(0)": "SystemExit: 0",
    "def make(:": "SyntaxError: invalid syntax (broken_models.py, line 1)",
}


@pytest.mark.parametrize("source", BROKEN)
def test_a_module_that_fails_to_import_is_distinguished_from_a_missing_one(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        resolve("broken_models:make")
    failed = f"target 'broken_models:make': importing 'broken_models' failed: {BROKEN[source]}"
    assert str(caught.value) == f"{failed} ({tmp_path / 'broken_models.py'}:1 in <module>: {source})"
    assert caught.value.__cause__ is not None


def test_what_a_module_adds_to_the_path_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    late = "import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
    adds = "import sys\nsys.path += ['lib']\ndef make():\n    import imported_late as m\n    return m.make()"
    (tmp_path / "lib/imported_late.py").write_text(late)
    (tmp_path / "adds_to_the_path.py").write_text(adds)
    before = [*sys.path, str(tmp_path)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*before])
    assert resolve("adds_to_the_path:make").name == "adds_to_the_path:make"
    assert sys.path == [*before, "lib"]
