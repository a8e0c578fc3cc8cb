"""ddpopt.judge.modes: an engine is found by its name, wherever it comes from, or refused with what to do."""

from importlib.metadata import EntryPoint

import pytest

from ddpopt.errors import UsageError
from ddpopt.judge import modes
from ddpopt.testing import Engine

HERE = "tests.selftest.engines"


def test_an_engine_is_given_itself_by_a_module_or_by_an_installed_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Engine("own")
    entry = EntryPoint("theirs", f"{HERE}:Averaging", modes.REGISTERED)
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
        (f"{HERE}:HEAD", f"engine '{HERE}:HEAD': expected a ddpopt.testing.Engine, or a function without"),
        (f"{HERE}:nothing", f"module '{HERE}' has no attribute 'nothing'"),
    ],
)
def test_what_is_no_engine_is_refused(given: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        modes.mode(given)
    assert message in str(raised.value)


def test_a_part_that_engines_do_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no 'step_' to replace; did you mean 'step'"):
        Engine("own", step_=None)
