"""pytest plugin: a test marked ``@pytest.mark.world_size(n)`` runs on n ranks.

- ``torchrun --nproc-per-node N -m pytest …``: this process is one of N ranks, on one node or several. A test
  that needs more is skipped with that reason, or fails with ``--too-few-ranks=fail``. The first rank prints
  the summary.
- ``pytest …``, also with xdist's ``-n``: this process starts n ranks, lets them run the test, and reports for
  them. The ranks are kept for the next test that needs n.

Each test has its own process group; the fixture ``ddp_ranks`` has its rank and size.

Invariant: a test that fails on one rank fails, shows that rank's traceback, and ends within its limit. Skips
are decided only by conditions that are equal on all ranks.

pytest loads this in every run of an environment where ddpopt is installed, so it does nothing, and does not
import torch, unless a test is marked.
"""

from collections.abc import Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from ddpopt.ranks.environment import launched_ranks, own_rank
from ddpopt.testing.needs import DIVIDED, LIMIT_S, is_marked, lacking, needs_of, rank_key, simulated_ranks
from ddpopt.testing.quiet import QuietRank

if TYPE_CHECKING:
    from ddpopt.ranks.group import Ranks
    from ddpopt.testing.launched import LaunchedRank
    from ddpopt.testing.pooled import Pools

launched_key: "pytest.StashKey[LaunchedRank]" = pytest.StashKey()
quiet_key: pytest.StashKey[QuietRank] = pytest.StashKey()
pools_key: "pytest.StashKey[Pools]" = pytest.StashKey()
ranks_key: "pytest.StashKey[Ranks]" = pytest.StashKey()
open_key: pytest.StashKey[ExitStack] = pytest.StashKey()

# A collective that a peer never enters times out before the test's limit, with a better message.
COLLECTIVE_SHARE = 0.5
NOT_GIVEN = (
    "expected to run on ranks, but another plugin runs this test in its own way. Disable plugins that "
    "repeat or fork tests, for instance with -p no:rerunfailures."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--too-few-ranks``.

    Args:
        parser: pytest's own.
    """
    parser.getgroup("ddpopt").addoption(
        "--too-few-ranks",
        choices=("skip", "fail"),
        default="skip",
        help="what a test marked world_size(n) does without n ranks, or for nccl without a GPU for each "
        "(default: skip)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker.

    Args:
        config: pytest's own.
    """
    config.addinivalue_line(
        "markers",
        "world_size(n, backend=None, timeout=seconds, simulate=False): run the test on n ranks, in a process "
        f"group of that backend ('gloo' or 'nccl'), for at most that long (default: {LIMIT_S:g} s); with "
        "simulate=True on one rank, where assert_ddp_equal simulates n (ddpopt)",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Disable pytest-timeout for marked tests: their limit is enforced here, over all ranks.

    Args:
        config: pytest's own.
        items: the collected tests.
    """
    # Under either name: from its entry point, or from -p.
    timed = any(map(config.pluginmanager.hasplugin, ("timeout", "pytest_timeout")))
    for item in items:
        if timed and is_marked(item):
            item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """In torchrun's ranks, first compare the tests that all ranks collected.

    Args:
        session: the session with all collected tests.
    """
    config = session.config
    if launched_ranks() is None or config.option.collectonly:
        return
    if any(is_marked(item) and not lacking(item) for item in session.items):
        from ddpopt.testing.launched import LaunchedRank

        launched = config.stash[launched_key] = config.stash[rank_key] = LaunchedRank()
        config.add_cleanup(launched.leave)
        if own_rank() != 0:
            quiet = config.stash[quiet_key] = QuietRank(config, own_rank(), lambda: launched.has_lost)
            config.pluginmanager.register(quiet)
            config.add_cleanup(quiet.end)
        launched.require_equal_collection(session)
        launched.require_reachable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on ranks.

    Args:
        item: the test about to run.
        nextitem: the next test.

    Returns:
        True if it was run here.
    """
    launched = item.config.stash.get(launched_key, None)
    if not is_marked(item) or (launched is None and rank_key in item.config.stash):
        return None  # a pool's rank runs its tests differently
    if needs_of(item).problem or lacking(item):
        return None  # its setup reports the reason
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    if launched is None:
        reports = [*_pools(item.config).run(item, nextitem), *_torn_down(item, nextitem)]
    else:
        reports = launched.run(item, nextitem)
    if quiet := item.config.stash.get(quiet_key, None):
        quiet.told(item.nodeid)
    for report in reports:
        # Passes are shown once; the exit code of every rank shows whether anything failed.
        if launched is None or own_rank() == 0 or report.failed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Join the process group of a marked test, or say why it cannot run.

    Args:
        item: the test about to run.
    """
    if not is_marked(item):
        return
    needs = needs_of(item)
    rank = item.config.stash.get(rank_key, None)
    if needs.problem:
        raise pytest.UsageError(needs.problem)
    if reason := lacking(item):
        _give_up(item, reason)
    if rank is None:
        pytest.fail(NOT_GIVEN, pytrace=False)
    from ddpopt.ranks.group import grouped

    if needs.backend == "nccl" and not rank.on_gpu:
        _give_up(item, "needs nccl, which needs a GPU for each rank on every node")
    backend = needs.backend or ("nccl" if rank.on_gpu else "gloo")
    item.stash[open_key] = ExitStack()
    group = grouped(COLLECTIVE_SHARE * needs.limit_s, rank.seat, backend=backend)
    item.stash[ranks_key] = item.stash[open_key].enter_context(group)
    token = simulated_ranks.set(needs.simulate)
    item.stash[open_key].callback(simulated_ranks.reset, token)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> object:
    """Leave the process group of a marked test, after its fixtures.

    Args:
        item: the test that ran.

    Returns:
        What the other plugins returned.
    """
    try:
        return (yield)
    finally:
        if stack := item.stash.get(open_key, None):
            stack.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make sure that no peer waits for a value of a rank whose test has failed.

    Args:
        item: the test that ran.
        call: a phase of the test.

    Returns:
        The report on that phase.
    """
    report = yield
    if report.failed and call.when != "teardown" and ranks_key in item.stash:
        item.stash[ranks_key].leave()
    return report


@pytest.fixture
def ddp_ranks(request: pytest.FixtureRequest) -> "Ranks":
    """The ranks of this test: ``rank``, ``size``, ``backend``, ``device`` and ``gather(value)``."""
    if ranks_key not in request.node.stash:
        raise pytest.UsageError(
            f"{request.node.nodeid}: expected a test that runs on ranks, got one without the marker. Write "
            "@pytest.mark.world_size(2) above it."
        )
    ranks: Ranks = request.node.stash[ranks_key]
    return ranks


def _torn_down(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """Tear down fixtures that earlier tests kept for this one, which runs elsewhere; return any failures."""
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    failed = call.excinfo is not None
    return [item.ihook.pytest_runtest_makereport(item=item, call=call)] if failed else []


def _give_up(item: pytest.Item, reason: str) -> None:
    if reason == DIVIDED or item.config.getoption("--too-few-ranks") == "fail":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _pools(config: pytest.Config) -> "Pools":
    if pools_key not in config.stash:
        from ddpopt.testing.pooled import Pools

        config.stash[pools_key] = Pools(config)
    return config.stash[pools_key]
