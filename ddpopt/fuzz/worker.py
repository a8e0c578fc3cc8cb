"""A worker process: one rank that answers questions about models until its pipe is closed.

Invariant: what it prints, and the stacks that it leaves when it dies, are in its log; the pipe has answers
alone.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddpopt.fuzz.questions import Answer, Task

COLLECTIVE_LIMIT_S = 60.0
MODULE = "ddpopt.fuzz.worker_process"
"""What a process runs."""


@dataclass(frozen=True)
class Seat:
    """Where a worker process sits.

    Attributes:
        rank: its number.
        size: how many answer together.
        store: the file by which they meet.
        log: the file that has what it prints, and its stacks.
    """

    rank: int
    size: int
    store: Path
    log: Path

    @property
    def arguments(self) -> list[str]:
        """As a command line has them."""
        return [str(self.rank), str(self.size), str(self.store), str(self.log)]

    @staticmethod
    def of(arguments: Sequence[str]) -> Seat:
        """Read what `arguments` wrote."""
        rank, size, store, log = arguments
        return Seat(int(rank), int(size), Path(store), Path(log))


@dataclass(frozen=True)
class Began:
    """Told when a mode begins; without a name when eager does."""

    mode: str


@dataclass(frozen=True)
class Done:
    """Told when a task is done."""

    answers: tuple[Answer, ...]


def serve(seat: Seat, pipe: Connection) -> None:
    """Answer tasks until there are no more.

    Args:
        seat: where this process sits.
        pipe: tasks come in, `Began` and `Done` go out.
    """
    log = os.open(seat.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    _answer(seat, pipe)


def _answer(seat: Seat, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    # after the streams are set, for these print while they are imported
    from ddpopt.fuzz.examine import examine
    from ddpopt.judge.trials import keep_for_good, quickly
    from ddpopt.ranks.group import joined

    torch.set_num_threads(1)
    _join(dist, seat)
    with quickly(), joined(timeout_s=COLLECTIVE_LIMIT_S) as ranks:
        pipe.send(Began("ready"))
        while (task := _next(pipe)) is not None:
            keep_for_good()
            pipe.send(Done(tuple(examine(ranks, task, lambda name: pipe.send(Began(name))))))
    os._exit(0)  # leaving a process group may take its time, and there is nothing to save


def _join(dist: Any, seat: Seat) -> None:
    limit = timedelta(seconds=COLLECTIVE_LIMIT_S)
    store = dist.HashStore() if seat.size == 1 else dist.FileStore(str(seat.store), seat.size)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=limit)


def _next(pipe: Connection) -> Task | None:
    try:
        task: Task | None = pipe.recv()
    except EOFError:
        return None
    return task
