"""The pytest plugin: what a test does that needs more ranks than torchrun started."""

from collections.abc import Callable

import pytest

pytest_plugins = ["pytester"]

NEEDS_TWO = """
import pytest

@pytest.mark.world_size(2)
def test_pair() -> None: pass

def test_alone() -> None: pass
"""
REASON = "needs 2 ranks, this run has 1: torchrun --nproc-per-node 2 -m pytest …"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Make a suite of two tests, with our plugin and no other that happens to be installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    pytester.makepyfile(NEEDS_TWO)
    return pytester


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give a function that makes the suite's runs look like those of torchrun with n ranks."""

    def pretend(ranks: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))

    return pretend


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    return suite.runpytest_inprocess("-p", "ddpopt.testing.plugin", "--strict-markers", "-ra", *args)


def test_outside_torchrun_every_test_runs(suite: pytest.Pytester) -> None:
    run(suite).assert_outcomes(passed=2)


def test_too_few_ranks_skip_a_test_and_say_the_command(
    suite: pytest.Pytester, under_torchrun: Callable[[int], None]
) -> None:
    under_torchrun(1)
    result = run(suite)
    result.assert_outcomes(passed=1, skipped=1)
    assert REASON in result.stdout.str()


def test_too_few_ranks_fail_a_test_where_none_may_be_lost(
    suite: pytest.Pytester, under_torchrun: Callable[[int], None]
) -> None:
    under_torchrun(1)
    result = run(suite, "--too-few-ranks=fail")
    result.assert_outcomes(passed=1, errors=1)
    assert REASON in result.stdout.str()


def test_enough_ranks_run_every_test(suite: pytest.Pytester, under_torchrun: Callable[[int], None]) -> None:
    under_torchrun(3)
    run(suite).assert_outcomes(passed=2)


@pytest.mark.parametrize("argument", ["0", "'2'", "", "2, 3", "n=2"])
def test_a_marker_without_one_positive_int_is_an_error(suite: pytest.Pytester, argument: str) -> None:
    suite.makepyfile(NEEDS_TWO.replace("world_size(2)", f"world_size({argument})"))
    result = run(suite)
    assert "expected world_size(n) with one positive int, got args" in result.stdout.str()
    assert "Write @pytest.mark.world_size(2)." in result.stdout.str()
