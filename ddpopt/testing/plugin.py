"""pytest plugin: a test marked ``@pytest.mark.world_size(n)`` runs on n ranks.

- ``torchrun --nproc-per-node N -m pytest …``: this process is one of N ranks, on one node or on several. A
  test that needs more says so and is skipped, or fails where ``--too-few-ranks=fail`` was given.
- ``pytest …``, also with xdist's ``-n``: this process starts n ranks, has them run the test, and reports for
  them. The ranks wait for the next test that needs as many.

Each test has a process group of its own; the fixture ``ddp_ranks`` tells its rank and size.

Invariant: a test that fails on one rank fails, shows that rank's traceback, and ends within its limit. What a
rank skips is decided by what is equal on all ranks.

pytest loads this in every run of an environment where ddpopt is installed, also in those that have nothing to
do with it; so it does nothing, and imports no torch, until a test is marked.
"""

import os
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

import pytest

from ddpopt.testing.rank_environment import POOL_PORT, launched_ranks, own_rank
from ddpopt.testing.rank_needs import DIVIDED, LIMIT_S, is_marked, lacking, needs_of, readable_needs

if TYPE_CHECKING:
    from ddpopt.testing.launched_rank import LaunchedRank
    from ddpopt.testing.pooled_rank import PooledRank
    from ddpopt.testing.rank_pools import RankPools
    from ddpopt.testing.ranks import Ranks

pooled_key: "pytest.StashKey[PooledRank]" = pytest.StashKey()
launched_key: "pytest.StashKey[LaunchedRank]" = pytest.StashKey()
pools_key: "pytest.StashKey[RankPools]" = pytest.StashKey()
ranks_key: "pytest.StashKey[Ranks]" = pytest.StashKey()
open_key: pytest.StashKey[ExitStack] = pytest.StashKey()

NOT_GIVEN = (
    "expected to run on ranks, but another plugin runs this test in its own way. Disable what repeats or "
    "forks tests, for instance with -p no:rerunfailures."
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
        help="what a test marked world_size(n) does where there are fewer than n ranks, or no GPU for each "
        "where it asks for nccl (default: skip)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; in a rank of a pool, find the pool.

    Args:
        config: pytest's own.
    """
    config.addinivalue_line(
        "markers",
        "world_size(n, backend=None, timeout=seconds): run the test on n ranks, in a process group of that "
        f"backend ('gloo' or 'nccl'), for at most that long (default: {LIMIT_S:g} s) (ddpopt)",
    )
    # Taken out, so that a pytest which a test starts is no rank.
    port = os.environ.pop(POOL_PORT, None)
    if port is not None:
        from ddpopt.testing.pooled_rank import PooledRank

        config.stash[pooled_key] = PooledRank(int(port))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set the options of the pytest that started the pool, in a rank of a pool.

    Args:
        session: pytest's own.
    """
    if pooled := session.config.stash.get(pooled_key, None):
        pooled.take_options(session.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep pytest-timeout from marked tests: their limit is kept here, over all ranks.

    Args:
        config: pytest's own.
        items: what was collected.
    """
    # Under either name: by its entry point, or by -p.
    timed = any(map(config.pluginmanager.hasplugin, ("timeout", "pytest_timeout")))
    for item in items:
        if timed and is_marked(item) and readable_needs(item) is not None:
            item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run what the pool names, in a rank of a pool; in torchrun's, compare first what all have collected.

    Args:
        session: with everything that was collected.

    Returns:
        True where tests were run here.
    """
    config = session.config
    if pooled := config.stash.get(pooled_key, None):
        pooled.serve(session)
        return True
    if launched_ranks() is None or config.option.collectonly:
        return None
    if any(is_marked(item) and not lacking(item) for item in session.items):
        from ddpopt.testing.launched_rank import LaunchedRank

        launched = config.stash[launched_key] = LaunchedRank()
        config.add_cleanup(launched.leave)
        launched.require_equal_collection(session)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test on ranks.

    Args:
        item: the test about to run.
        nextitem: the one after it.

    Returns:
        True if it was run here.
    """
    if not is_marked(item):
        return None
    if pooled := item.config.stash.get(pooled_key, None):
        pooled.run(item, nextitem)
        return True
    if readable_needs(item) is None or lacking(item):
        return None  # its setup says why
    launched = item.config.stash.get(launched_key, None)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = _pools(item.config).run(item, nextitem) if launched is None else launched.run(item, nextitem)
    for report in reports:
        # Passes are shown once. The exit code of every rank says whether anything failed.
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
    rank = item.config.stash.get(pooled_key, None) or item.config.stash.get(launched_key, None)
    if not item.config.stash.get(pooled_key, None) and (reason := lacking(item)):
        _give_up(item, reason)
    if rank is None:
        pytest.fail(NOT_GIVEN, pytrace=False)
    from ddpopt.testing.ranks import seated

    if needs.backend == "nccl" and not rank.seat.on_gpu:
        _give_up(item, "needs nccl, which needs a GPU for each rank on every node")
    item.stash[open_key] = ExitStack()
    item.stash[ranks_key] = item.stash[open_key].enter_context(
        seated(rank.seat, needs.backend, needs.limit_s)
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """Let torchrun interrupt a marked test on this rank when a peer has died.

    Args:
        item: the test that runs.

    Returns:
        What the other plugins returned.
    """
    launched = item.config.stash.get(launched_key, None) if is_marked(item) else None
    with nullcontext() if launched is None else launched.interruptible():
        return (yield)


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


def _give_up(item: pytest.Item, reason: str) -> None:
    if reason == DIVIDED or item.config.getoption("--too-few-ranks") == "fail":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _pools(config: pytest.Config) -> "RankPools":
    if pools_key not in config.stash:
        from ddpopt.testing.rank_pools import RankPools

        config.stash[pools_key] = RankPools(config)
    return config.stash[pools_key]
