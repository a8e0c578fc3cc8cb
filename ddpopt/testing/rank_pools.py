"""All pools of ranks of one pytest process.

Invariant: a pool is started by the first test that needs it, and ended with the pytest process, or when one
of its ranks is lost.
"""

import pytest
from _pytest.reports import TestReport

from ddpopt.testing.rank_needs import is_marked, needs_of, readable_needs
from ddpopt.testing.rank_pool import RankPool

__all__ = ["RankPools"]


class RankPools:
    """The pools of one pytest process: one for each number of ranks, kept from test to test."""

    def __init__(self, config: pytest.Config) -> None:
        """Start nothing yet.

        Args:
            config: pytest's own; the pools end with it.
        """
        self._config = config
        self._pools: dict[int, RankPool] = {}
        config.add_cleanup(self.close)

    def run(self, item: pytest.Item) -> list[TestReport]:
        """Run a marked test on as many ranks as it needs.

        Args:
            item: the test.

        Returns:
            Its reports, merged over the ranks.
        """
        needs = needs_of(item)
        pool = self._pools.get(needs.size)
        if pool is None or not pool.usable:
            pool = self._pools[needs.size] = RankPool(
                self._config, needs.size, _files_of(item.session, needs.size)
            )
        return pool.run(item, needs.limit_s)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()


def _files_of(session: pytest.Session, size: int) -> list[str]:
    """The files with tests for that many ranks: no rank need collect another one."""
    marked = [item for item in session.items if is_marked(item)]
    needs_of_each = [(item, readable_needs(item)) for item in marked]
    files = [str(item.path) for item, needs in needs_of_each if needs is not None and needs.size == size]
    return list(dict.fromkeys(files))
