"""Ranks that plain ``pytest``, or a worker of xdist's, starts for itself and drives test by test.

Each rank is a pytest of its own in a pool's process: it collects the same tests, and then runs those that it
is sent the names of. What matters while pytest loads is given to it as arguments. All other options, those of
the user's conftest.py among them, are set when its session starts: too late for plugins that write reports or
start workers, which must do nothing in a rank, and in time for collection and tests.

Invariant: every test gets a report, and ends within its limit; if a rank is lost, the test fails with what
that rank had written, and the next test gets new ranks.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol
from torch.distributed.distributed_c10d import PrefixStore

from ddpopt.errors import UsageError
from ddpopt.ranks.environment import own_rank, own_size
from ddpopt.ranks.failures import RankFailure, RanksFailed
from ddpopt.ranks.group import gpu_for_each_rank
from ddpopt.ranks.pool import Pool
from ddpopt.ranks.process import RankProcess
from ddpopt.testing.needs import is_marked, needs_of, rank_key
from ddpopt.testing.reports import difference, from_text, lost, merge, to_text

# Importing torch and collecting, on a machine that is busy with other tests.
START_LIMIT_S = 120.0
SHOWN_OUTPUT = 8000
# A rank's reports travel as text, so one style has to serve all of them.
RANKS_OWN = ("tbstyle",)
PLAIN = (str, int, float, list, tuple, dict, type(None))


class Pools:
    """The pools of one pytest process: one for each number of ranks, kept from test to test."""

    def __init__(self, config: pytest.Config) -> None:
        """Start nothing yet.

        Args:
            config: pytest's own; the pools end with it.
        """
        self._config = config
        self._pools: dict[int, Pool] = {}
        self._differences: dict[int, str] = {}
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
        pool = self._pools.get(needs.size) or self._new_pool(item.session, needs.size)
        doing, limit_s = "starting: ", START_LIMIT_S
        try:
            if not pool.is_running:
                self._differences[needs.size] = difference(pool.run(collected, limit_s=limit_s))
            if self._differences[needs.size]:
                return lost(item, self._differences[needs.size])
            doing, limit_s = "", needs.limit_s
            following = nextitem.nodeid if nextitem and _size_for(nextitem) == needs.size else ""
            texts: dict[int, str] = dict(
                enumerate(pool.run(PooledRank.run, item.nodeid, following, limit_s=limit_s))
            )
            failures: dict[int, RankFailure] = {}
        except RanksFailed as failed:
            texts = {} if doing else failed.values
            failures = {failure.rank: failure for failure in failed.failures}
        reports = [from_text(item.config, texts[rank]) if rank in texts else [] for rank in range(needs.size)]
        for rank, failure in failures.items():
            wrote = f"{failure.output}{failure.stack}"[-SHOWN_OUTPUT:]
            reports[rank] = lost(item, f"{doing}this rank {failure.how}; it wrote:\n{wrote}")
        return merge(reports)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()

    def _new_pool(self, session: pytest.Session, size: int) -> Pool:
        # No rank need collect other files.
        files = dict.fromkeys(str(item.path) for item in session.items if _size_for(item) == size)
        folder = str(self._config.invocation_params.dir)
        options = plain_options(self._config)
        host = partial(be_pytest, folder, [*rank_arguments(self._config), *files], options)
        self._pools[size] = Pool(size, host=host)
        return self._pools[size]


def _size_for(item: pytest.Item) -> int:
    """How many ranks run a test; 0 if it is not for ranks."""
    return needs_of(item).size if is_marked(item) else 0


def rank_arguments(config: pytest.Config) -> list[str]:
    """Give the arguments of a rank's pytest, without the files to collect.

    Args:
        config: of the pytest that starts it.
    """
    option = config.option
    # What a rank prints belongs in its report, and in its output should it give none.
    arguments = ["-q", "-p", "no:cacheprovider", "--capture", "tee-sys"]
    arguments += ["--tb", "short" if option.tbstyle == "auto" else option.tbstyle]
    arguments += ["--rootdir", str(config.rootpath), "--import-mode", option.importmode]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    # addopts may start workers, or write files that are not a rank's to write; what it set travels below.
    for setting in (*(option.override_ini or ()), "addopts="):
        arguments += ["-o", setting]
    for plugin in option.plugins or ():
        arguments += ["-p", plugin]
    # A rank has imported ddpopt before pytest could rewrite its asserts, of which none are a test's.
    for warning in (*(option.pythonwarnings or ()), "ignore::pytest.PytestAssertRewriteWarning"):
        arguments += ["-W", warning]
    return arguments


def plain_options(config: pytest.Config) -> dict[str, object]:
    """Give the options that a rank is to have too: all that are plain data.

    Args:
        config: of the pytest that starts it.
    """
    options = {name: value for name, value in vars(config.option).items() if isinstance(value, PLAIN)}
    return {name: value for name, value in options.items() if name not in RANKS_OWN}


# ---------------------------------------------------------------------------------------- in a rank's process


def be_pytest(
    folder: str, arguments: Sequence[str], options: dict[str, object], process: RankProcess
) -> None:
    """Serve a pool from inside a session of pytest's.

    Args:
        folder: to run in.
        arguments: of pytest.
        options: of the pytest that started the pool.
        process: the rank.
    """
    os.chdir(folder)
    sys.exit(pytest.main(list(arguments), plugins=[PooledRank(process, options)]))


class PooledRank:
    """This process, as a rank of a pool; a plugin of its pytest.

    Attributes:
        session: with everything that was collected.
        reports: of the test that ran last.
    """

    def __init__(self, process: RankProcess, options: dict[str, object]) -> None:
        self._process = process
        self._options = options
        self._following = ""
        self.session: Any = None
        self.reports: list[TestReport] = []
        self.on_gpu = gpu_for_each_rank()

    @property
    def seat(self) -> tuple[Any, int, int]:
        """The store of the test that runs, this rank's number, and how many there are."""
        store: Any = PrefixStore(f"group/{self._process.number}", self._process.store)
        return store, own_rank(), own_size()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Let our plugin find this."""
        config.stash[rank_key] = self

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Set the options of the pytest that started the pool."""
        vars(session.config.option).update(self._options)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run nothing but what the pool asks for."""
        self.session = session
        self._process.serve(lambda _: nullcontext(self))
        session._setupstate.teardown_exact(None)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test, and keep its reports for the pool."""
        self.reports = runtestprotocol(item, log=False, nextitem=nextitem)
        return True

    def run(self, name: str, following: str) -> str:
        """Run a test by its name.

        Args:
            name: of the test.
            following: the test after it, if the same ranks run that; fixtures that it needs too are kept.

        Returns:
            Its reports, as text.
        """
        items = {item.nodeid: item for item in self.session.items}
        if name not in items:
            raise UsageError(
                f"expected the ranks to collect {name} as the pytest that started them did, but they "
                "collected no test of that name. A parameter's id must be the same in every process."
            )
        if name != self._following:
            # pytest has kept the fixtures of the test that was to come next; another one must not see them.
            self.session._setupstate.teardown_exact(None)
        self._following = following
        hook = self.session.config.hook
        hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
        return to_text(self.session.config, self.reports)


def collected(rank: PooledRank) -> list[str]:
    """Give the ids of a rank's tests.

    Raises:
        UsageError: a file could not be collected.
    """
    if rank.session.testsfailed:
        raise UsageError(f"expected to collect what is marked, got {rank.session.testsfailed} errors")
    return [item.nodeid for item in rank.session.items]
