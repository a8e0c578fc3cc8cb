"""ddpopt.judge.engines.modes: an engine is found by its name, wherever it comes from, or refused."""

import gc
from importlib.metadata import EntryPoint
from typing import Any, cast

import pytest
import torch
from torch._dynamo.guards import CheckFunctionManager

from ddpopt.errors import UsageError
from ddpopt.judge.engines import modes, names
from ddpopt.judge.engines.modes import MODES
from ddpopt.judge.training.options import OPTIONS
from ddpopt.judge.trials.runner import verify
from ddpopt.testing import Engine
from tests.support.refusals import refusal

HERE = "tests.selftest.engines"


def test_an_engine_is_given_itself_by_a_module_or_by_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Engine("own")
    entry = EntryPoint("theirs", f"{HERE}:Averaging", names.REGISTERED)
    monkeypatch.setattr(modes, "entry_points", lambda group: [entry])
    modes._registered.cache_clear()
    found = [modes.mode(given) for given in (own, f"{HERE}:SumsOnly", "theirs")]
    modes._registered.cache_clear()
    assert found[0] is own
    assert [engine.name for engine in found] == ["own", f"{HERE}:SumsOnly", "theirs"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("eagre", "did you mean 'eager'?"),
        (Engine, "mode: expected a name or a ddpopt.testing.Engine, got <class"),
        (f"{HERE}:HEAD", f"engine '{HERE}:HEAD': expected a ddpopt.testing.Engine, or a function without"),
        (f"{HERE}:nothing", f"module '{HERE}' has no attribute 'nothing'"),
    ],
)
def test_what_is_no_engine_is_refused(given: Any, message: str) -> None:
    assert message in refusal(lambda: modes.mode(given))


def test_an_installed_package_that_is_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", "no_such_package:make", names.REGISTERED)
    monkeypatch.setattr(modes, "entry_points", lambda group: [entry])
    modes._registered.cache_clear()
    with pytest.raises(UsageError, match=r"engine 'theirs': cannot import 'no_such_package:make'.*repair or"):
        modes.engines()
    modes._registered.cache_clear()


def test_what_cannot_be_judged_is_refused_before_ranks_start() -> None:
    twice = refusal(lambda: verify("tied", engine=[Engine(), Engine()]))
    assert "expected a name of its own for each, got 'engine' twice" in twice
    words = "mesh: expected (copies, parts), such as (2, 2), got '2x2'"
    assert words in refusal(lambda: verify("tied", mesh=cast(Any, "2x2")))


def test_a_part_that_engines_do_not_have_is_refused() -> None:
    assert "there is no 'step_' to replace; did you mean 'step'" in refusal(lambda: Engine("own", step_=None))


def test_the_names_that_need_no_torch_are_those_of_all_modes_and_options() -> None:
    assert tuple(each.name for each in MODES) == names.MODES
    assert tuple(each.name for each in OPTIONS) == names.OPTIONS


def test_what_code_was_guarded_by_is_forgotten_with_it() -> None:
    def guards() -> int:
        gc.collect()
        return sum(type(each) is CheckFunctionManager for each in gc.get_objects())

    def first(*given: torch.Tensor) -> torch.Tensor:
        return given[0].sin()

    before = guards()
    with modes.mode("whole").running():
        torch.compile(first, backend="eager")(torch.ones(2))
        assert guards() > before
    assert guards() <= before
