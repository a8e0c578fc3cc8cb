"""Lanes: processes, one for each rank, that stay up between jobs and are replaced when one fails.

A crash of one way to run a model must not cost the results of another, and a native abort or a hang cannot be
caught inside a process; so each job runs in a lane, under a time limit.

Invariant: `Lane.run` returns one answer for each rank, whatever happens to the processes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Job = Callable[[int, int, str], Any]
"""Called in each rank's process with rank, world size and the path of a fresh rendezvous file."""


@dataclass(frozen=True)
class Lost:
    """The answer of a rank that gave none.

    Attributes:
        reason: one line: died, late, or raised.
        detail: the traceback, or the last lines that the process wrote to its standard error; for a late
            process these are the stacks of its threads.
    """

    reason: str
    detail: str


class Lane:
    """One process for each rank of a world.

    Args:
        world_size: number of ranks.
        limit_s: seconds a job may take before the lane's processes are ended.
    """

    def __init__(self, world_size: int, limit_s: float = 300.0) -> None:
        self._world_size = world_size
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="ddpopt-lane-")
        self._jobs = 0
        self._workers: list[_Worker] = []

    def run(self, job: Job) -> list[Any]:
        """Run `job` on every rank.

        Args:
            job: picklable; called as ``job(rank, world_size, rendezvous_path)``.

        Returns:
            For each rank what `job` returned, or `Lost`.
        """
        if not self._workers:
            folder = Path(self._folder.name)
            self._workers = [_Worker(folder / f"stderr-{rank}") for rank in range(self._world_size)]
        self._jobs += 1
        rendezvous = str(Path(self._folder.name) / f"rendezvous-{self._jobs}")
        for rank, worker in enumerate(self._workers):
            worker.send((job, rank, self._world_size, rendezvous))
        deadline = time.monotonic() + self._limit_s
        answers = [worker.receive(deadline - time.monotonic()) for worker in self._workers]
        if any(isinstance(answer, Lost) for answer in answers):
            self._end_workers(grace_s=0.0)
        return answers

    def close(self) -> None:
        """End the lane's processes and remove its files."""
        self._end_workers(grace_s=10.0)
        self._folder.cleanup()

    def _end_workers(self, grace_s: float) -> None:
        for worker in self._workers:
            worker.end(grace_s)
        self._workers = []


class _Worker:
    """A process that answers one request after the other."""

    def __init__(self, errors: Path) -> None:
        context = multiprocessing.get_context("spawn")  # fork would copy torch's locked threads
        self._connection, theirs = context.Pipe()
        self._errors = errors
        self._process = context.Process(target=_serve, args=(theirs, str(errors)), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, request: Sequence[Any]) -> None:
        """Hand over a request; a process that is gone is noticed in `receive`."""
        try:
            self._connection.send(request)
        except OSError:
            return

    def receive(self, limit_s: float) -> Any:
        """The answer, or `Lost` after `limit_s` seconds or when the process dies."""
        try:
            if self._connection.poll(max(0.0, limit_s)):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            return Lost(f"process died with exit code {self._process.exitcode}", self._last_lines())
        return Lost("no answer within the limit", self._stacks())

    def _stacks(self) -> str:
        """Where each thread of a late process stands."""
        if self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(1.0)  # the handler answers by writing to standard error
        return self._last_lines()

    def end(self, grace_s: float) -> None:
        """Let the process end by itself for `grace_s` seconds, then end it: it may hang in a collective."""
        self.send(())
        self._process.join(grace_s)
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _last_lines(self) -> str:
        lines = self._errors.read_text(errors="replace").splitlines() if self._errors.exists() else []
        return "\n".join(lines[-80:])


def _serve(connection: Connection[Any, Any], errors: str) -> None:
    """Answer requests until an empty one comes, or the other end closes."""
    _redirect_stderr(errors)
    try:
        while request := connection.recv():
            connection.send(_answer(*request))
    except EOFError:
        return


def _answer(job: Job, rank: int, world_size: int, rendezvous: str) -> Any:
    try:
        return job(rank, world_size, rendezvous)
    except Exception as error:  # any failure of a job is an answer
        return Lost(f"{type(error).__name__}: {error}", traceback.format_exc())


def _redirect_stderr(errors: str) -> None:
    """Keep for a post-mortem what would tear the parent's display; SIGUSR1 adds the stacks of all threads."""
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
