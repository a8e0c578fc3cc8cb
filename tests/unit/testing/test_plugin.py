"""The pytest plugin without ranks: what it does before any is needed, and where a test cannot have them.

`tests/multigpu/alone/test_plugin.py` has the tests that need ranks.
"""

import pytest

pytest_plugins = ["pytester"]

NEEDS_TWO = """
import pytest

@pytest.mark.world_size(2)
def test_pair() -> None: pass

def test_alone() -> None: pass
"""
REASON = "needs 2 ranks, this run has 1: torchrun --nproc-per-node 2 -m pytest …"
XDIST = "torchrun's ranks cannot be divided among xdist's"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Make a suite of two tests, with our plugin and no other that happens to be installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    pytester.makepyfile(NEEDS_TWO)
    return pytester


def run(suite: pytest.Pytester, *args: str) -> pytest.RunResult:
    return suite.runpytest_inprocess("-p", "ddpopt.testing.plugin", "--strict-markers", "-ra", *args)


def test_without_a_marked_test_neither_torch_nor_a_rank_is_loaded(suite: pytest.Pytester) -> None:
    suite.makepyfile("import sys\ndef test_light() -> None: assert 'torch' not in sys.modules")
    result = suite.runpytest_subprocess("-p", "ddpopt.testing.plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_collecting_tests_starts_no_rank(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert "test_pair" in run(suite, "--collect-only").stdout.str()


@pytest.mark.parametrize(
    ("variables", "option", "outcomes", "words"),
    [
        ({"WORLD_SIZE": "1"}, "-ra", {"passed": 1, "skipped": 1}, REASON),
        ({"WORLD_SIZE": "1"}, "--too-few-ranks=fail", {"passed": 1, "errors": 1}, REASON),
        ({"WORLD_SIZE": "2", "PYTEST_XDIST_WORKER": "gw0"}, "-ra", {"passed": 1, "errors": 1}, XDIST),
    ],
)
def test_under_torchrun_a_test_that_cannot_have_its_ranks_says_why(
    variables: dict[str, str],
    option: str,
    outcomes: dict[str, int],
    words: str,
    suite: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "run", **variables}.items():
        monkeypatch.setenv(name, value)
    result = run(suite, option)
    result.assert_outcomes(**outcomes)
    assert words in result.stdout.str()


def test_the_fixture_without_the_marker_is_an_error_that_says_what_to_write(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_alone(ddp_ranks): pass")
    result = run(suite)
    result.assert_outcomes(errors=1)
    assert "expected a test that runs on ranks, got one without the marker" in result.stdout.str()
    assert "Write @pytest.mark.world_size(2) above it." in result.stdout.str()


A_NUMBER = "expected world_size(n) with one positive int, got args"
CHOICES = "expected world_size(n, backend='gloo' or 'nccl', timeout=seconds above 0, simulate=True), got"


@pytest.mark.parametrize(
    ("argument", "said"),
    [("0", A_NUMBER), ("", A_NUMBER), ("2, backend='mpi'", CHOICES), ("2, timeout=0", CHOICES)],
)
def test_a_marker_without_one_positive_int_or_with_another_backend_or_limit_is_an_error(
    argument: str, said: str, suite: pytest.Pytester
) -> None:
    suite.makepyfile(NEEDS_TWO.replace("world_size(2)", f"world_size({argument})"))
    result = run(suite)
    result.assert_outcomes(passed=1, errors=1)
    assert said in result.stdout.str()


def test_pytest_timeout_leaves_marked_tests_to_the_plugin(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        conftest="""
        from ddpopt.testing.needs import is_marked, needs_of
        def pytest_collection_finish(session):
            for item in session.items:
                limit_s = needs_of(item).limit_s if is_marked(item) else None
                print(item.name, limit_s, [mark.args for mark in item.iter_markers("timeout")][:1])
        """,
        test_timed="""
        import pytest
        @pytest.mark.timeout(7)
        @pytest.mark.world_size(2)
        def test_both(): pass
        @pytest.mark.timeout(7)
        @pytest.mark.world_size(2, timeout=3)
        def test_own(): pass
        @pytest.mark.timeout(7)
        def test_theirs(): pass
        """,
    )
    text = run(suite, "-p", "pytest_timeout", "--collect-only", "test_timed.py").stdout.str()
    assert "test_both 7.0 [(0,)]" in text
    assert "test_own 3.0 [(0,)]" in text
    assert "test_theirs None [(7,)]" in text


def test_what_a_test_before_set_up_for_one_on_ranks_is_torn_down_before_the_next_module(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpopt.testing.pooled.Pools.run", lambda *_: [])
    mixed = """
        import pytest
        torn_down = []
        @pytest.fixture(scope="module", autouse=True)
        def costly():
            yield
            torn_down.append("costly")
        def test_here(): pass
        @pytest.mark.world_size(2)
        def test_on_ranks(): pass
        """
    later = """
        import test_mixed
        def test_later(): assert test_mixed.torn_down == ["costly"]
        """
    suite.makepyfile(test_mixed=mixed, test_next=later)
    run(suite, "test_mixed.py", "test_next.py").assert_outcomes(passed=2)
