"""Ranks that plain ``pytest``, or an xdist worker, starts and drives test by test.

Each rank is a separate pytest in a pool's process: it collects the same tests, and then runs those whose
names it receives. Options that matter while pytest loads are passed as arguments. All other options,
including those of the user's conftest.py, are set when its session starts: too late for plugins that write
reports or start workers, which must do nothing in a rank, but in time for collection and tests.

Invariant: every test gets a report, and ends within its limit; if a rank is lost, the test fails with that
rank's output, and the next test gets new ranks.
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

# For importing torch and collecting on a machine that is busy with other tests.
START_LIMIT_S = 120.0
SHOWN_OUTPUT = 8000
# A rank's reports are sent as text, so the traceback style must be fixed there.
RANKS_OWN = ("tbstyle",)
PLAIN = (str, int, float, list, tuple, dict, type(None))


class Pools:
    """The pools of one pytest process: one for each number of ranks, kept from test to test."""

    def __init__(self, config: pytest.Config) -> None:
        """Create the pools; starts no process yet.

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
            nextitem: the next test; fixtures that it shares are kept if the same ranks run it.

        Returns:
            Its reports, merged over the ranks.
        """
        needs = needs_of(item)
        pool = self._pools.get(needs.size) or self._new_pool(item.session, needs.size)
        doing = "starting: "
        limit_s = START_LIMIT_S
        try:
            if not pool.is_running:
                self._differences[needs.size] = difference(pool.run(collected, limit_s=limit_s))
            if self._differences[needs.size]:
                return lost(item, self._differences[needs.size])
            doing = ""
            limit_s = needs.limit_s
            following = nextitem.nodeid if nextitem and _size_for(nextitem) == needs.size else ""
            answers = pool.run(PooledRank.run, item.nodeid, following, limit_s=limit_s)
            texts: dict[int, str] = dict(enumerate(answers))
            failures: dict[int, RankFailure] = {}
            parting = ""
        except RanksFailed as failed:
            texts = {} if doing else failed.values
            parting = failed.parting
            failures = {failure.rank: failure for failure in failed.failures}
        reports = [from_text(item.config, texts[rank]) if rank in texts else [] for rank in range(needs.size)]
        for rank, failure in failures.items():
            wrote = f"{failure.output}{failure.stack}"[-SHOWN_OUTPUT:]
            said = f"{doing}this rank {failure.how}; it wrote:\n{wrote}\n{parting}".strip("\n")
            reports[rank] = lost(item, said)
        return merge(reports)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()

    def _new_pool(self, session: pytest.Session, size: int) -> Pool:
        # Ranks do not need to collect other files.
        files = dict.fromkeys(str(item.path) for item in session.items if _size_for(item) == size)
        folder = str(self._config.invocation_params.dir)
        options = plain_options(self._config)
        host = partial(be_pytest, folder, [*rank_arguments(self._config), *files], options)
        self._pools[size] = Pool(size, host=host)
        return self._pools[size]


def _size_for(item: pytest.Item) -> int:
    """The number of ranks that run a test; 0 if it does not run on ranks."""
    return needs_of(item).size if is_marked(item) else 0


def rank_arguments(config: pytest.Config) -> list[str]:
    """Return the arguments of a rank's pytest, without the files to collect.

    Args:
        config: config of the pytest that starts the rank.
    """
    option = config.option
    # A rank's output goes into its report, and also to the pool in case there is no report.
    arguments = ["-q", "-p", "no:cacheprovider", "--capture", "tee-sys"]
    arguments += ["--tb", "short" if option.tbstyle == "auto" else option.tbstyle]
    arguments += ["--rootdir", str(config.rootpath), "--import-mode", option.importmode]
    if config.inipath is not None:
        arguments += ["-c", str(config.inipath)]
    # addopts may start workers, or write files that a rank must not write; its options are set later.
    for setting in (*(option.override_ini or ()), "addopts="):
        arguments += ["-o", setting]
    for plugin in option.plugins or ():
        arguments += ["-p", plugin]
    # A rank imports ddpopt before pytest can rewrite its asserts, which are not part of any test.
    for warning in (*(option.pythonwarnings or ()), "ignore::pytest.PytestAssertRewriteWarning"):
        arguments += ["-W", warning]
    return arguments


def plain_options(config: pytest.Config) -> dict[str, object]:
    """Return the options that a rank also gets: all that are plain data.

    Args:
        config: config of the pytest that starts the rank.
    """
    options = {name: value for name, value in vars(config.option).items() if isinstance(value, PLAIN)}
    return {name: value for name, value in options.items() if name not in RANKS_OWN}


# ---------------------------------------------------------------------------------------- in a rank's process


def be_pytest(
    folder: str, arguments: Sequence[str], options: dict[str, object], process: RankProcess
) -> None:
    """Serve a pool from inside a pytest session.

    Args:
        folder: the folder to run in.
        arguments: the arguments of pytest.
        options: the options of the pytest that started the pool.
        process: the rank.
    """
    os.chdir(folder)
    sys.exit(pytest.main(list(arguments), plugins=[PooledRank(process, options)]))


class PooledRank:
    """This process, as a rank of a pool; a plugin of its pytest.

    Attributes:
        session: the session with all collected tests.
        reports: the reports of the last test.
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
        """The store of the current test, this rank's number, and the number of ranks."""
        store: Any = PrefixStore(f"group/{self._process.number}", self._process.store)
        return store, own_rank(), own_size()

    def pytest_configure(self, config: pytest.Config) -> None:
        """Make this rank known to ddpopt's plugin."""
        config.stash[rank_key] = self

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Set the options of the pytest that started the pool."""
        vars(session.config.option).update(self._options)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run only the tests that the pool requests."""
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
            name: name of the test.
            following: the next test, if the same ranks run it; fixtures that it shares are kept.

        Returns:
            Its reports, as text.
        """
        items = {item.nodeid: item for item in self.session.items}
        if name not in items:
            raise UsageError(
                f"expected the ranks to collect {name} as the pytest that started them did, but they "
                "collected no test with that name. A parameter's id must be the same in every process."
            )
        if name != self._following:
            # pytest kept fixtures for the test that was announced as next; a different test must not see
            # them.
            self.session._setupstate.teardown_exact(None)
        self._following = following
        hook = self.session.config.hook
        hook.pytest_runtest_protocol(item=items[name], nextitem=items.get(following))
        return to_text(self.session.config, self.reports)


def collected(rank: PooledRank) -> list[str]:
    """Return the ids of a rank's tests.

    Raises:
        UsageError: a file could not be collected.
    """
    if rank.session.testsfailed:
        raise UsageError(f"expected to collect what is marked, got {rank.session.testsfailed} errors")
    return [item.nodeid for item in rank.session.items]
