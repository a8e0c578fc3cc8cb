"""Running every test of this folder on several ranks at once.

- ``torchrun --nproc-per-node N -m pytest tests/multigpu``: this process is one of N ranks; after each test
  the ranks exchange what happened.
- ``pytest tests/multigpu``: this process starts N ranks (``DDPOPT_NPROC``, default 2; more where a test is
  marked ``world_size``), has them run each test, and reports for them. So it does as a worker of xdist.

A test marked ``one_process`` runs once, in one process without a process group.

Invariant: a test that fails on one rank fails everywhere, shows that rank's traceback, and ends within its
limit (``@pytest.mark.timeout(seconds)``, default LIMIT_S).
"""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

from ddpopt.testing.plugin import needed_ranks
from tests.multigpu.rank_pool import RankPool
from tests.multigpu.ranks import Ranks, joined_ranks
from tests.multigpu.reports import from_text, lost_rank, merge, to_text

FOLDER = Path(__file__).parent
LIMIT_S = 120.0
# How much longer one waits for a peer's report than the test may take on that peer.
GRACE_S = 10.0
POLL_S = 0.01
DEFAULT_RANKS = 2

pool_key = pytest.StashKey[RankPool]()
store_key = pytest.StashKey[Any]()
count_key = pytest.StashKey[int]()
limit_key = pytest.StashKey[float]()


def is_rank() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_rank_of_pool() -> bool:
    return "DDPOPT_POOL_PORT" in os.environ


def own_rank() -> int:
    return int(os.environ["RANK"])


def own_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_process: the test runs in one process, without ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER not in item.path.parents or runs_in_one_process(item):
            continue
        marker = item.get_closest_marker("timeout")
        item.stash[limit_key] = float(marker.args[0]) if marker is not None else LIMIT_S
        # In a rank of torchrun's the limit ends the process: no exception reaches a thread that waits inside
        # C++. It counts for the test alone, not for waiting for a peer's report. A process that starts ranks
        # keeps the time itself.
        limit_s = item.stash[limit_key] if is_rank() and not is_rank_of_pool() else 0
        item.add_marker(pytest.mark.timeout(limit_s, method="thread", func_only=True), append=False)


def runs_in_one_process(item: pytest.Item) -> bool:
    return item.get_closest_marker("one_process") is not None


def limit_of(item: pytest.Item) -> float:
    return item.stash.get(limit_key, LIMIT_S)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if FOLDER not in item.path.parents or (runs_in_one_process(item) and not is_rank()):
        return None
    if is_rank_of_pool():
        return report_to_pool(item)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = on_this_rank(item, nextitem) if is_rank() else on_started_ranks(item)
    for report in reports:
        # Passes are shown once. The exit code of every rank says whether anything failed.
        if not is_rank() or own_rank() == 0 or report.failed:
            item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


# ------------------------------------------------------------------------- the process that starts ranks


def on_started_ranks(item: pytest.Item) -> list[TestReport]:
    config = item.config
    size = max(int(os.environ.get("DDPOPT_NPROC", DEFAULT_RANKS)), needed_ranks(item))
    pool = config.stash.get(pool_key, None)
    if pool is None or not pool.usable or pool.size != size:
        if pool is not None:
            pool.close()
        pool = config.stash[pool_key] = RankPool(config, FOLDER, size)
    return merge(pool.run(item, limit_of(item)))


def pytest_unconfigure(config: pytest.Config) -> None:
    pool = config.stash.get(pool_key, None)
    if pool is not None:
        pool.close()


# ----------------------------------------------------------------------------------------------- a rank


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests that the pool names, in a rank of a pool."""
    if not is_rank_of_pool():
        return None
    items = {item.nodeid: item for item in session.items}
    store = rank_store(session.config)
    number = 0
    while name := wait_for(store, f"test/{number}"):
        session.config.stash[count_key] = number
        session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=None)
        number += 1
    return True


def report_to_pool(item: pytest.Item) -> bool:
    reports = runtestprotocol(item, log=False, nextitem=None)
    key = f"reports/{item.config.stash[count_key]}/{own_rank()}"
    rank_store(item.config).set(key, to_text(item.config, reports))
    return True


def on_this_rank(item: pytest.Item, nextitem: pytest.Item | None) -> list[TestReport]:
    """Run a test on this rank of torchrun's, and learn how its peers fared."""
    config = item.config
    number = config.stash[count_key] = config.stash.get(count_key, 0) + 1
    if runs_in_one_process(item) and own_rank() != 0:
        item.add_marker(pytest.mark.skip(reason="runs on rank 0 only"))
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    store = rank_store(config)
    store.set(f"reports/{number}/{own_rank()}", to_text(config, reports))
    texts = [wait_for(store, f"reports/{number}/{rank}", limit_of(item)) for rank in range(own_size())]
    lost = lost_rank(item, "this rank gave no report: it was ended at its limit, or died")
    return merge([from_text(config, text) if text else lost for text in texts])


def wait_for(store: Any, key: str, limit_s: float = float("inf")) -> str:
    deadline = time.monotonic() + limit_s + GRACE_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            return ""
        time.sleep(POLL_S)
    return str(store.get(key).decode())


def rank_store(config: pytest.Config) -> Any:
    """The store that all ranks of this run share, whatever process groups their tests make."""
    if store_key not in config.stash:
        config.stash[store_key] = open_store()
    return config.stash[store_key]


def open_store() -> Any:
    c10d: Any = dist  # torch does not mark its re-exports
    if is_rank_of_pool():
        return c10d.TCPStore("127.0.0.1", int(os.environ["DDPOPT_POOL_PORT"]), is_master=False)
    store, _, _ = next(iter(c10d.rendezvous("env://", timeout=timedelta(seconds=LIMIT_S))))
    return c10d.PrefixStore("ddpopt-tests", store)


@pytest.fixture(autouse=True)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks | None]:
    """The ranks of this test, with a process group of its own as the default one."""
    config = request.config
    if runs_in_one_process(request.node):
        yield None
        return
    c10d: Any = dist
    store = c10d.PrefixStore(f"group/{config.stash[count_key]}", rank_store(config))
    with joined_ranks(store, own_rank(), own_size()) as joined:
        yield joined
