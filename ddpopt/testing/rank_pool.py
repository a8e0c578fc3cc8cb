"""The ranks that plain ``pytest``, or a worker of xdist's, starts for itself and drives test by test.

Each rank is a pytest process of its own, which collects the same tests and then waits for names of tests to
run. Names go out and reports come back through a store that the starting process holds.

Invariant: every test ends within its limit. If a rank dies or stalls, all ranks are ended, the test fails
with what those ranks had written, and the next test gets new ranks. Nothing that a rank started outlives its
pool, nor the process that started the pool.
"""

import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from _pytest.reports import TestReport

from ddpopt.ranks.marked import end_marked, guarded
from ddpopt.testing.rank_collection import difference
from ddpopt.testing.rank_command import options_as_text, rank_command
from ddpopt.testing.rank_environment import POOL_PORT, environment_of_no_rank
from ddpopt.testing.rank_reports import from_text, lost, merge, trimmed

__all__ = ["RankPool"]

# Importing torch and collecting, on a machine that is busy with other tests.
START_LIMIT_S = 120.0
# Once one rank has failed, its peers have this long to notice; once one has died, to say what they saw.
PATIENCE_WITH_PEERS_S = 10.0
LAST_WORDS_S = 2.0
STOP_LIMIT_S = 5.0
POLL_S = 0.01
# Who waits for a long test looks less often: looking takes time from the cores that the ranks need.
SLOWEST_POLL_S = 0.1
POLL_SHARE = 0.02
SHOWN_OUTPUT = 8000
MARK = "DDPOPT_POOL_FOLDER"


class RankPool:
    """Some ranks that wait for tests to run.

    Attributes:
        size: how many.
    """

    def __init__(self, config: pytest.Config, size: int, files: Sequence[str]) -> None:
        """Start the ranks, without waiting for them.

        Args:
            config: of the process that starts them.
            size: how many.
            files: with the tests that they may be asked to run.
        """
        self.size = size
        self._config = config
        self._tests_run = 0
        self._read_before = [0] * size
        self._collected: list[list[str]] | None = None
        self._open = contextlib.ExitStack()
        self._folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="ddpopt-pool-")))
        self._mark = f"{MARK}={self._folder}"
        self._open.enter_context(guarded(self._mark, self._folder))
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not mark its re-exports
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_LIMIT_S)
        )
        self._store.set("options", options_as_text(config))
        command = rank_command(config, files)
        self._ranks = [self._start(rank, command) for rank in range(size)]

    def _start(self, rank: int, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        environment = {
            **environment_of_no_rank(),
            MARK: str(self._folder),
            POOL_PORT: str(self._store.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
        }
        folder = self._config.invocation_params.dir
        with self._output(rank).open("wb") as output:
            return subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def usable(self) -> bool:
        """Whether all ranks are alive."""
        return all(process.poll() is None for process in self._ranks)

    def run(self, item: pytest.Item, limit_s: float, nextitem: pytest.Item | None) -> list[TestReport]:
        """Run one test on all ranks. The pool may be unusable afterwards.

        Args:
            item: the test.
            limit_s: how long it may take.
            nextitem: the next test for these ranks if that follows at once; fixtures that it needs are kept.

        Returns:
            Its reports, merged over the ranks.
        """
        if self._collected is None:
            keys = [f"collected/{rank}" for rank in range(self.size)]
            if missing := self._missing(keys, START_LIMIT_S):
                return self._give_up(keys, missing, item, "starting: ")
            self._collected = [json.loads(self._store.get(key)) for key in keys]
        refusal = difference(self._collected) or self._unknown(item)
        if refusal:
            return lost(item, refusal)
        keys = [f"reports/{self._tests_run}/{rank}" for rank in range(self.size)]
        self._read_before = [self._output(rank).stat().st_size for rank in range(self.size)]
        self._name(item.nodeid, "" if nextitem is None else nextitem.nodeid)
        self._tests_run += 1
        if missing := self._missing(keys, limit_s):
            return self._give_up(keys, missing, item, "")
        return merge([from_text(self._config, self._store.get(key).decode()) for key in keys])

    def _name(self, test: str, following: str) -> None:
        """Name the test to run, and the one that follows at once; no name ends the ranks."""
        self._store.set(f"test/{self._tests_run}", json.dumps([test, following]))

    def _unknown(self, item: pytest.Item) -> str:
        if self._collected is not None and item.nodeid in self._collected[0]:
            return ""
        return (
            f"expected the ranks to collect {item.nodeid} as this process did, but they collected no test "
            "of that name. A parameter's id must be the same in every process. Rank 0 wrote:\n"
            f"{self._written(0)}"
        )

    def _missing(self, keys: Sequence[str], limit_s: float) -> dict[int, str]:
        """Wait for the ranks' answers; which ranks gave none, and why."""
        began = time.monotonic()
        deadline, why = began + limit_s, f"gave no report within {limit_s:g} s"
        noticed: set[str] = set()
        signs = (
            (lambda _: not self.usable, LAST_WORDS_S, "did not end before a peer died"),
            (self._one_failed, PATIENCE_WITH_PEERS_S, "did not end after a peer had failed"),
        )
        while not self._store.check(list(keys)):
            share_s = POLL_SHARE * (time.monotonic() - began)
            time.sleep(min(max(POLL_S, share_s), SLOWEST_POLL_S))
            for sign, patience_s, words in signs:
                soon = time.monotonic() + patience_s
                if words not in noticed and soon < deadline and sign(keys):
                    noticed.add(words)
                    deadline, why = soon, words
            left = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            all_dead = all(self._ranks[rank].poll() is not None for rank in left)
            if all_dead or time.monotonic() > deadline:
                return {rank: self._end_of(rank) or why for rank in left}
        return {}

    def _one_failed(self, keys: Sequence[str]) -> bool:
        texts = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return '"outcome": "failed"' in "".join(texts)

    def _end_of(self, rank: int) -> str:
        """How a rank's process ended; empty while it runs."""
        code = self._ranks[rank].poll()
        if code is None:
            return ""
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _give_up(
        self, keys: Sequence[str], missing: dict[int, str], item: pytest.Item, doing: str
    ) -> list[TestReport]:
        """End all ranks; the test's reports."""
        self._dump_stacks(list(missing))
        reports = [
            lost(item, f"{doing}this rank {missing[rank]}; it wrote:\n{self._written(rank)}")
            if rank in missing
            else []
            if doing
            else from_text(self._config, self._store.get(key).decode())
            for rank, key in enumerate(keys)
        ]
        self.close()
        return merge(reports)

    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        # pytest's faulthandler writes all threads' stacks on this signal.
        for rank in ranks:
            if self._ranks[rank].poll() is None:
                self._ranks[rank].send_signal(signal.SIGABRT)
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ranks[rank].wait(STOP_LIMIT_S)

    def _output(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.output"

    def _written(self, rank: int) -> str:
        """What a rank has written since the last test began, or since it started."""
        written = self._output(rank).read_bytes()[self._read_before[rank] :]
        return trimmed(written.decode(errors="replace"))[-SHOWN_OUTPUT:]

    def close(self) -> None:
        """End all ranks, and whatever they have started."""
        self._name("", "")
        deadline = time.monotonic() + STOP_LIMIT_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self._ranks):
            if not all(process.poll() in (None, 0) for process in self._ranks):
                break
            time.sleep(POLL_S)
        end_marked(self._mark)
        for process in self._ranks:
            process.wait()
        self._open.close()
