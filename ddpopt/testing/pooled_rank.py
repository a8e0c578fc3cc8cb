"""A rank of a pool: a pytest process that runs the tests that the pool names, one after another.

Invariant: it runs nothing of its own accord, and reports on every test that it was given.
"""

import itertools
import json
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.runner import runtestprotocol

from ddpopt.testing.rank_command import set_options
from ddpopt.testing.rank_environment import own_rank, own_size
from ddpopt.testing.rank_reports import to_text
from ddpopt.testing.ranks import Seat, gpu_for_each_rank

__all__ = ["PooledRank"]

c10d: Any = dist  # torch does not mark its re-exports
# A rank waits as long as its pool lives: the store's connection breaks with that.
FOREVER = timedelta(days=30)


class PooledRank:
    """This process, as a rank of a pool.

    Attributes:
        seat: where it stands in the test that runs.
    """

    def __init__(self, port: int) -> None:
        """Connect to the pool.

        Args:
            port: of its store.
        """
        self._store = c10d.TCPStore("127.0.0.1", port, is_master=False)
        self._on_gpu = gpu_for_each_rank()
        self._number = 0

    @property
    def seat(self) -> Seat:
        """Where this process stands in the test that runs."""
        store = c10d.PrefixStore(f"group/{self._number}", self._store)
        return Seat(store, own_rank(), own_size(), self._on_gpu)

    def take_options(self, config: pytest.Config) -> None:
        """Set the options of the pytest that started the pool.

        Args:
            config: of this process.
        """
        set_options(config, self._store.get("options").decode())

    def serve(self, session: pytest.Session) -> None:
        """Run tests until the pool says that there are no more.

        Args:
            session: with everything that was collected.
        """
        items = {item.nodeid: item for item in session.items}
        self._store.set(f"collected/{own_rank()}", json.dumps([item.nodeid for item in session.items]))
        expected = ""
        for self._number in itertools.count():
            key = f"test/{self._number}"
            self._store.wait([key], FOREVER)
            name, following = json.loads(self._store.get(key))
            if name != expected:
                # pytest tears down for the test that it was told comes next; no other may run before that.
                session._setupstate.teardown_exact(None)
            if not name:
                return
            expected = following
            session.config.hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Run one test and report on it.

        Args:
            item: the test.
            nextitem: the one after it; fixtures that it needs too are kept.
        """
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        self._store.set(f"reports/{self._number}/{own_rank()}", to_text(item.config, reports))
