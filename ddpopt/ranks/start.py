"""Starting ranks on this machine, following them, and bringing back what their task returned.

torch's elastic agent starts the ranks, watches them, and ends all when one fails. It runs in a thread of its
own, so that it touches no signal handler and the caller's thread is free to follow the run. Here stands what
the agent does not do: limits, values, events, and a report of every rank.

Invariant: when `launch` returns or raises, no process is left of those that it started, nor of theirs, and
nothing global has changed.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch

from ddpopt.errors import InfrastructureError, UsageError
from ddpopt.ranks.agent import Agent
from ddpopt.ranks.failures import Kind, RankFailure, RanksFailed
from ddpopt.ranks.folder import EventReader, RankFiles, Start, write_start
from ddpopt.ranks.marked import end_marked, guarded, signal_marked

__all__ = ["launch"]

Value = TypeVar("Value")

POLL_S = 0.05
# How much longer than its limit a run may take: ranks end themselves at it, unless they are stopped.
LATE_S = 2.0
# How long a rank's peers may go on after it died in silence (then they are asked to end) …
PATIENCE_S = 2.0
# … and how long they may take to do so (then they are killed).
LAST_WORDS_S = 1.0

# What is not the task's in stacks of faulthandler's: its headline, which counts from the last time that a
# limit was set, its list of modules, and our frames.
OWN_LINES = re.compile(
    r'^(Timeout \(.*\)!|Extension modules: .*|  File ".*/ranks/process\.py", line \d+ in .*)\n',
    re.MULTILINE,
)

# The agent would do this too, but never closes its files.
INTO_A_FILE = 'out="$1/rank-$RANK.output"; shift; exec "$@" </dev/null >"$out" 2>&1'
MARK = "DDPOPT_RANKS_FOLDER"
BOOT = (
    "import json, sys; "
    "sys.path[:] = json.load(open(sys.argv[1] + '/start.json'))['path']; "
    "from ddpopt.ranks.process import main; "
    "main(sys.argv[1])"
)


def launch(
    task: Callable[..., Value],
    *args: Any,
    nproc: int,
    limit_s: float,
    on_event: Callable[[object], None] | None = None,
    device: str | None = "cpu",
) -> list[Value]:
    """Run a task on ranks of its own, in new processes on this machine.

    Args:
        task: called on each rank as ``task(ranks, *args)``, inside a process group. It travels by
            cloudpickle, so it may be a lambda, or stand in a script without ``if __name__ == "__main__"``.
        *args: for the task.
        nproc: how many ranks.
        limit_s: seconds that all of this may take; collectives time out somewhat earlier.
        on_event: called, in this thread, with each object that rank 0 emits.
        device: ``"cpu"`` (gloo), ``"cuda"`` (NCCL, one GPU for each rank), or None for CUDA where there are
            enough GPUs.

    Returns:
        What the task returned, by rank.

    Raises:
        UsageError: if an argument cannot be used.
        RanksFailed: if a rank raised, died or stalled; says which, and where.
        InfrastructureError: if the ranks could not be started.
    """
    device = _checked(nproc, limit_s, device)
    with tempfile.TemporaryDirectory(prefix="ddpopt-ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        deadline = time.monotonic() + limit_s
        start = Start(sys.path[:], os.getpid(), nproc, deadline, device)
        write_start(folder, start, _dumped(task, args))
        mark = f"{MARK}={folder}"
        run = _Run(folder, start, mark)
        with guarded(mark, folder):
            run.follow(on_event or _ignore)
        return run.values()


def _ignore(event: object) -> None:
    """Where nobody follows the run."""


def _checked(nproc: int, limit_s: float, device: str | None) -> str:
    if nproc < 1 or not limit_s > 0:
        raise UsageError(f"expected nproc >= 1 and limit_s > 0, got nproc={nproc!r}, limit_s={limit_s!r}")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device is None:
        return "cuda" if gpus >= nproc else "cpu"
    if device not in ("cpu", "cuda"):
        raise UsageError(f"expected the device 'cpu', 'cuda' or None, got {device!r}")
    if device == "cuda" and gpus < nproc:
        raise UsageError(
            f"expected a GPU for each of {nproc} ranks, found {gpus}; "
            "ask for fewer ranks, or for device 'cpu'"
        )
    return device


def _dumped(task: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return bytes(cloudpickle.dumps((task, args)))
    except Exception as error:
        raise UsageError(
            f"expected a task and arguments that can be pickled, got {task!r} with "
            f"({', '.join(type(arg).__name__ for arg in args)}): {error}. "
            "Build inside the task what cannot travel."
        ) from error


class _Run:
    """Ranks that run, and what became of them."""

    def __init__(self, folder: Path, start: Start, mark: str) -> None:
        self._start = start
        self._mark = mark
        self._files = [RankFiles(folder, rank) for rank in range(start.size)]
        self._events = EventReader(folder)
        self._agent = Agent(_command(folder, self._mark), start.size, folder / "agent")
        self._end_at = start.deadline + LATE_S
        self._kill_at = math.inf
        self._killed: set[int] = set()

    def follow(self, on_event: Callable[[object], None]) -> None:
        """Run to the end, whatever that is; nothing is left behind."""
        try:
            self._agent.start()
            while not self._ended_meanwhile():
                self._deliver(on_event)
                self._press()
        finally:
            while self._agent.ident is not None and not self._ended_meanwhile():
                end_marked(self._mark)  # again and again: the agent may be about to start a rank
            end_marked(self._mark)
        self._agent.join()
        self._deliver(on_event)

    def _ended_meanwhile(self) -> bool:
        """Whether the agent has ended, now or after a little wait.

        Not by the event's own ``wait``: where Ctrl-C comes while it takes its lock or gives it back, either
        an error of the lock's comes out in the place of KeyboardInterrupt, or nothing comes out at all.
        """
        if not self._agent.ended.is_set():
            time.sleep(POLL_S)
        return self._agent.ended.is_set()

    def _deliver(self, on_event: Callable[[object], None]) -> None:
        for event in self._events.receive():
            on_event(event)

    def _press(self) -> None:
        """Ask ranks to end whose time is over or whose peer is gone; kill them if they do not."""
        now = time.monotonic()
        if any(files.is_gone() and not files.returned.exists() for files in self._files):
            self._end_at = min(self._end_at, now + PATIENCE_S)
        if now > self._kill_at:
            self._killed |= {rank for rank, files in enumerate(self._files) if not files.is_gone()}
            signal_marked(self._mark, signal.SIGKILL)
        elif now > self._end_at and self._kill_at == math.inf:
            signal_marked(self._mark, signal.SIGTERM)
            self._kill_at = now + LAST_WORDS_S

    def values(self) -> list[Any]:
        """Each rank's value, if each has one."""
        if self._agent.error is not None:
            raise InfrastructureError(
                f"expected to start {self._start.size} ranks on this machine, got {self._agent.error!r}"
            ) from self._agent.error
        found = [self._failure(rank) for rank in range(self._start.size)]
        failures = [failure for failure in found if failure is not None]
        if failures:
            raise RanksFailed(self._with_a_first(failures), self._start.size)
        return [self._value(files) for files in self._files]

    def _value(self, files: RankFiles) -> Any:
        try:
            return cloudpickle.loads(files.returned.read_bytes())
        except Exception as error:
            raise UsageError(
                f"expected a value that can be read here, got {error!r} from what the task returned. Let it "
                "return objects whose classes the launching process can import."
            ) from error

    def _failure(self, rank: int) -> RankFailure | None:
        files, exit_code = self._files[rank], self._agent.exit_codes.get(rank, 0)
        if files.returned.exists() and exit_code in (0, -signal.SIGTERM):
            return None
        kind, stack = self._how(rank, exit_code)
        if (
            kind == "raised"
        ):  # it may have been ended while it waited for its peers to say what they had to say
            exit_code = 1
        return RankFailure(
            rank=rank,
            kind=kind,
            what=files.last_note() or "starting",
            exit_code=exit_code,
            signal=signal.Signals(-exit_code).name if exit_code < 0 else "",
            stack=OWN_LINES.sub("", stack),
            output=files.output(),
        )

    def _how(self, rank: int, exit_code: int) -> tuple[Kind, str]:
        files = self._files[rank]
        if files.raised.exists():
            return "raised", files.read(files.raised)
        if stalled := files.read(files.stalled):
            return "stalled", stalled
        if exit_code == -signal.SIGTERM or rank in self._killed:
            too_late = self._kill_at < math.inf and self._end_at > self._start.deadline
            return ("stalled" if too_late else "ended"), files.read(files.ended)
        return "died", files.read(files.crashed)

    def _with_a_first(self, failures: list[RankFailure]) -> list[RankFailure]:
        """Where the first to fail was ended, somebody else than us ended it: it died."""
        if any(failure.kind in ("died", "stalled") for failure in failures):
            return failures
        first = min(failures, key=lambda failure: self._files[failure.rank].failed_at())
        return [
            replace(one, kind="died") if one is first and one.kind == "ended" else one for one in failures
        ]


def _command(folder: Path, mark: str) -> list[str]:
    """The command of a rank. The variables that env sets are its own, and not of this process."""
    threads = [] if "OMP_NUM_THREADS" in os.environ else ["OMP_NUM_THREADS=1"]
    # -P: no module of the working directory stands in for one of Python's; -u: last words are not lost.
    python = [sys.executable, "-P", "-u", "-c", BOOT, str(folder)]
    return ["sh", "-c", INTO_A_FILE, "sh", str(folder), "env", mark, *threads, *python]
