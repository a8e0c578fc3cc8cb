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

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[TestReport]:
        """Run a marked test on as many ranks as it needs.

        Args:
            item: the test.
            nextitem: the one after it; fixtures that it needs too are kept where the same ranks run it.

        Returns:
            Its reports, merged over the ranks.
        """
        needs = needs_of(item)
        pool = self._pools.get(needs.size)
        if pool is None or not pool.usable:
            pool = self._pools[needs.size] = RankPool(
                self._config, needs.size, _files_of(item.session, needs.size)
            )
        return pool.run(item, needs.limit_s, nextitem if _size_for(nextitem) == needs.size else None)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()


def _files_of(session: pytest.Session, size: int) -> list[str]:
    """The files with tests for that many ranks: no rank need collect another one."""
    return list(dict.fromkeys(str(item.path) for item in session.items if _size_for(item) == size))


def _size_for(item: pytest.Item | None) -> int | None:
    """How many ranks run a test; None if it is not for ranks."""
    needs = readable_needs(item) if item is not None and is_marked(item) else None
    return None if needs is None else needs.size
