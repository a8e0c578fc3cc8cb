"""A rank that torchrun or another launcher started: it runs each marked test together with its peers.

The ranks meet before a test, so that a rank busy with an unmarked test keeps no peer waiting inside a
collective. After the test they exchange their reports.

Invariant: a test that fails on one rank fails on every rank, and ends within its limit. If a rank is lost,
its peers fail the test, report what is known about that rank, and run no other test.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol

from ddpopt.ranks.arrival import Arrival, address_towards, announced_by_gloo, unreachable
from ddpopt.ranks.black_box import keeping_record_of_launched
from ddpopt.ranks.environment import own_rank, own_size
from ddpopt.ranks.group import gpu_for_each_rank
from ddpopt.ranks.limits import Limits
from ddpopt.testing.needs import needs_of
from ddpopt.testing.reports import difference, from_text, lost, merge, to_text

c10d: Any = dist  # torch does not mark its re-exports
START_LIMIT_S = 120.0
# Before a marked test, peers may be busy with unmarked ones, which have no limit here.
MEETING_LIMIT_S = 900.0
# How long to wait for a peer's report beyond the test's limit on that peer …
GRACE_S = 10.0
# … and after the launcher has asked all ranks to end.
LAST_WORDS_S = 2.0
POLL_S = 0.01

LOST = "this rank sent no report: it died or was terminated; after a timeout, its stacks are in the output"
ENDED = "the launcher terminated this rank: a peer failed, or the run was canceled"
LATE = "this rank did not reach this test: it died, or is still busy with an earlier one"


class LaunchedRank:
    """This process, as a rank that a launcher started.

    Attributes:
        on_gpu: whether each rank has its own GPU.
    """

    def __init__(self) -> None:
        """Connect to the peers' store."""
        store, _, _ = next(iter(c10d.rendezvous("env://", timeout=timedelta(seconds=START_LIMIT_S))))
        self._store = c10d.PrefixStore("ddpopt-tests", store)
        # Output of tests is captured; the stacks of a rank that exceeds its limit go to the terminal.
        self._limits = Limits(os.dup(2))
        self._number = 0
        self._lost = False
        self.on_gpu = False
        self._recorded = ExitStack()
        self._recorded.enter_context(keeping_record_of_launched(own_rank()))
        signal.signal(signal.SIGTERM, self._stop)

    @property
    def seat(self) -> tuple[Any, int, int]:
        """The store of the current test, this rank's number, and the number of ranks."""
        return c10d.PrefixStore(f"group/{self._number}", self._store), own_rank(), own_size()

    @property
    def has_lost(self) -> bool:
        """Whether a rank was lost."""
        return self._lost

    def require_equal_collection(self, session: pytest.Session) -> None:
        """Compare the tests that all ranks have collected.

        Args:
            session: the session with this rank's collected tests.

        Raises:
            pytest.UsageError: the ranks differ; raised on every rank.
        """
        names = [item.nodeid for item in session.items]
        if session.testsfailed:
            names.append(f"({session.testsfailed} errors in collection)")
        lists = self._exchange("names", "\0".join(names), START_LIMIT_S)
        # a rank without an answer has died, or has no marked test
        if words := difference([text.split("\0") if text else [] for text in lists]):
            raise pytest.UsageError(words)

    def require_reachable(self) -> None:
        """Check, where tests will use gloo, that ranks on other machines can be reached.

        Raises:
            pytest.UsageError: a rank cannot be; raised on every rank.
        """
        announced = "" if gpu_for_each_rank() else announced_by_gloo()
        own = f"{address_towards(os.environ['MASTER_ADDR'])} {announced}"
        said = self._exchange("addresses", own, START_LIMIT_S)
        arrivals = [Arrival("", *text.split(" ")) for text in said if text is not None]
        if problem := unreachable(arrivals):
            raise pytest.UsageError(problem)

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[TestReport]:
        """Run a test on this rank, and collect the reports of its peers.

        Args:
            item: the test.
            nextitem: the next test; fixtures that it shares are kept.

        Returns:
            The test's reports, merged over the ranks.
        """
        self._number += 1
        present = self._exchange("present", "gpu" if gpu_for_each_rank() else "cpu", MEETING_LIMIT_S)
        if None in present:
            return self._end(item, [[] if text else lost(item, LATE) for text in present])
        self.on_gpu = set(present) == {"gpu"}
        limit_s = needs_of(item).limit_s
        reports = lost(item, ENDED)
        try:
            with self._limits.limited(limit_s, item.nodeid):
                reports = runtestprotocol(item, log=False, nextitem=nextitem)
            texts = self._exchange("reports", to_text(item.config, reports), limit_s + GRACE_S)
        except pytest.exit.Exception:
            if not self._lost:
                raise
            texts = self._exchange("reports", to_text(item.config, reports), LAST_WORDS_S)
        merged = [from_text(item.config, text) if text else lost(item, LOST) for text in texts]
        return self._end(item, merged) if self._lost or None in texts else merge(merged)

    def _end(self, item: pytest.Item, reports_of: Sequence[list[TestReport]]) -> list[TestReport]:
        self._lost = True
        item.session.shouldstop = "a rank was lost; the tests after this one were not run"
        return merge(reports_of)

    def leave(self) -> None:
        """Wait until the peers have shown their results: the launcher ends all ranks when one fails."""
        if not self._lost:
            self._exchange("ended", "", LAST_WORDS_S)
        self._recorded.close()

    def _exchange(self, what: str, text: str, limit_s: float) -> list[str | None]:
        """Exchange texts between all ranks; None for ranks that sent none in time."""
        keys = [f"{what}/{self._number}/{rank}" for rank in range(own_size())]
        deadline = time.monotonic() + limit_s
        try:
            self._store.set(keys[own_rank()], text)
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]
        except c10d.DistError:  # the rank that held the store has died
            return [text if rank == own_rank() else None for rank in range(own_size())]

    def _stop(self, *_: object) -> None:
        """Interrupt this rank once and let it report: the launcher ends all ranks when one is lost."""
        if not self._lost:
            self._lost = True
            pytest.exit(ENDED)
