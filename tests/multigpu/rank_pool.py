"""The ranks that plain ``pytest`` starts for itself, and drives test by test.

Each rank is a pytest process of its own, which collects the same tests and then waits for names of tests to
run. Names go out and reports come back through a store that the starting process holds.

Invariant: every test ends within its limit. If a rank dies or stalls, all ranks are ended, the test fails
with what those ranks had written, and the next test gets new ranks.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO

import pytest
import torch.distributed as dist
from _pytest.reports import TestReport

from tests.multigpu.reports import from_text, lost_rank

__all__ = ["RankPool", "environment_of_no_rank"]

# Once one rank has failed, its peers have this long to notice.
PATIENCE_WITH_PEERS_S = 10.0
# Importing torch and collecting, on a machine that is busy with other tests.
START_LIMIT_S = 120.0
STOP_LIMIT_S = 5.0
POLL_S = 0.01
SHOWN_OUTPUT = 8000
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment_of_no_rank() -> dict[str, str]:
    """The environment without anything that makes a process a rank or a worker of another run."""
    ours = ("TORCHELASTIC_", "PYTEST_", "DDPOPT_POOL")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith(ours)
    }


class RankPool:
    """Some ranks that wait for tests to run."""

    def __init__(self, config: pytest.Config, folder: Path, size: int) -> None:
        self.size = size
        self._config = config
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not mark its re-exports
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_LIMIT_S)
        )
        self._tests_run = 0
        self._open = contextlib.ExitStack()
        self._outputs: list[IO[str]] = []
        self._ranks = [self._start(rank, folder) for rank in range(size)]

    def _start(self, rank: int, folder: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        # What a rank prints stands in its report, and in its output should it give none.
        command += [
            "--tb",
            "short",
            "--capture",
            "tee-sys",
            "--rootdir",
            str(self._config.rootpath),
            str(folder),
        ]
        if self._config.inipath is not None:
            command += ["-c", str(self._config.inipath)]
        environment: Mapping[str, str] = {
            **environment_of_no_rank(),
            "DDPOPT_POOL_PORT": str(self._store.port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
        }
        output = self._open.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # closed with the pool
        self._outputs.append(output)
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True
        )

    def run(self, item: pytest.Item, limit_s: float) -> Sequence[list[TestReport]]:
        """Run one test on all ranks; each rank's reports. The pool may be unusable afterwards."""
        number, self._tests_run = self._tests_run, self._tests_run + 1
        self._store.set(f"test/{number}", item.nodeid)
        keys = [f"reports/{number}/{rank}" for rank in range(self.size)]
        why = self._await(keys, limit_s + (START_LIMIT_S if number == 0 else 0.0))
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        self._dump_stacks(missing)
        reports = [
            lost_rank(item, f"{why.format(limit_s=limit_s)}; it wrote:\n{self._output(rank)}")
            if rank in missing
            else from_text(self._config, self._store.get(key).decode())
            for rank, key in enumerate(keys)
        ]
        if missing:
            self.close()
        return reports

    def _await(self, keys: Sequence[str], limit_s: float) -> str:
        """Wait for all reports, or for a reason not to; the reason."""
        deadline = time.monotonic() + limit_s
        hurried = False
        while not self._store.check(list(keys)):
            time.sleep(POLL_S)
            if time.monotonic() > deadline:
                return (
                    "a peer failed, and this rank did not end"
                    if hurried
                    else ("no report within {limit_s:g} s")
                )
            if not hurried and self._one_failed(keys):
                deadline = min(deadline, time.monotonic() + PATIENCE_WITH_PEERS_S)
                hurried = True
            if any(process.poll() is not None for process in self._ranks):
                time.sleep(10 * POLL_S)  # its peers may be about to report
                return "this rank or a peer died"
        return ""

    def _one_failed(self, keys: Sequence[str]) -> bool:
        arrived = [key for key in keys if self._store.check([key])]
        return any(
            report.failed
            for key in arrived
            for report in from_text(self._config, self._store.get(key).decode())
        )

    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        # pytest's faulthandler writes all threads' stacks on this signal.
        for rank in ranks:
            if self._ranks[rank].poll() is None:
                self._ranks[rank].send_signal(signal.SIGABRT)
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ranks[rank].wait(STOP_LIMIT_S)

    def _output(self, rank: int) -> str:
        output = self._outputs[rank]
        output.flush()
        output.seek(0)
        text = output.read()[-SHOWN_OUTPUT:]
        return f"(exit code {self._ranks[rank].poll()})\n{text}"

    @property
    def usable(self) -> bool:
        """Whether all ranks are alive."""
        return all(process.poll() is None for process in self._ranks)

    def close(self) -> None:
        """End all ranks."""
        self._store.set(f"test/{self._tests_run}", "")
        deadline = time.monotonic() + STOP_LIMIT_S
        for process in self._ranks:
            try:
                process.wait(max(0.0, deadline - time.monotonic()) if self.usable else POLL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._open.close()
