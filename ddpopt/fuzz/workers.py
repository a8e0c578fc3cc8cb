"""Workers as the process that asks them sees them: started, asked, ended at their limit, and replaced.

A worker is as many processes as there are ranks. A model may take one down, or never end: then all of it is
ended, the failure is an answer like others, and the next question starts new ones.
Invariant: each task gets an answer for each of its modes, whatever becomes of the processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from ddpopt.errors import InfrastructureError
from ddpopt.fuzz.questions import WHOLE, Answer, Kind, Task
from ddpopt.fuzz.signatures import NO_END, Signature, of_death
from ddpopt.fuzz.worker import MODULE, Began, Done, Seat

STARTING_LIMIT_S = 300.0
BY_EXCEPTION = "exit code"
LOOK_S = 0.5
PATIENCE = 5.0
"""How many times its limit a model may take where it waits for the processor, or for something else."""
STACKS_S = 2.0
"""For a process to write its stacks before it is ended."""
DETAIL = 2000
"""Characters of a log that are kept."""
TASKS = 300
"""After which a worker is replaced: Dynamo's caches grow."""


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path


@dataclass
class Worker:
    """One that answers, on as many ranks as it is asked for.

    Attributes:
        nproc: how many ranks.
        limit_s: of one mode of one model, in seconds of the processor.
        deaths: how many of its processes died or were ended.
    """

    nproc: int
    limit_s: float
    deaths: int = 0
    _processes: list[_Process] = field(default_factory=list)
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ddpopt-fuzz-")))
    _tasks: int = 0

    def ask(self, task: Task) -> Iterator[Answer | None]:
        """Have a task answered.

        Args:
            task: the question; it runs on `nproc` ranks.

        Yields:
            None while it runs, so that the caller may do something else; then an answer for each mode.
        """
        left = list(task.modes)
        while left:
            if not self._processes or self._tasks >= TASKS:
                yield from self._start()
            self._tasks += 1
            part = replace(task, modes=tuple(left))
            answers: list[Answer] = []
            for news in self._asked(part):
                if news is None:
                    yield None
                else:
                    answers.append(news)
            if self._tasks > 1 and {answer.kind for answer in answers} == {Kind.EAGER}:
                self._end()  # it may be what an earlier model left behind: asked once more in a new process
                continue
            if len(answers) == 1 and answers[0].kind is Kind.WRONG and answers[0].mode != WHOLE:
                answers = yield from self._attributed(task, answers[0])
            yield from answers
            done = {answer.mode for answer in answers}
            left = [name for name in left if name not in done]

    def close(self) -> None:
        """End its processes, and remove its files."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------ one question

    def _asked(self, task: Task) -> Iterator[Answer | None]:
        """Ask, and follow what comes back, until the task is done or a process is gone."""
        running, waiting = "", set(range(self.nproc))
        answers: tuple[Answer, ...] = ()
        for each in self._processes:
            with contextlib.suppress(OSError):  # one that died is found below
                each.pipe.send(task)
        clock = _Clock(self._processes)
        while waiting:
            for rank in sorted(waiting):
                news = _received(self._processes[rank])
                if isinstance(news, Began) and rank == 0:
                    running, clock = news.mode, _Clock(self._processes)
                elif isinstance(news, Done):
                    waiting.discard(rank)
                    answers = news.answers if rank == 0 else answers
                elif isinstance(news, _Dead):
                    yield from self._lost(task, running, self._death())
                    return
            if clock.is_past(self.limit_s):
                yield from self._lost(task, running, self._stalled())
                return
            yield None
        yield from answers

    def _lost(self, task: Task, running: str, told: tuple[Signature, str]) -> Iterator[Answer]:
        """The answer of a mode that took its processes down; of all modes, if that was eager."""
        signature, detail = told
        self.deaths += 1
        if running not in task.modes:
            yield from (Answer(name, Kind.EAGER, signature, detail) for name in task.modes)
            return
        kind = Kind.BACKEND if running == WHOLE else Kind.WRONG
        # what a model raises is caught: a process that ends by an exception has one of verification's own
        yield Answer(
            running, Kind.BROKEN if signature.what.startswith(BY_EXCEPTION) else kind, signature, detail
        )

    def _attributed(self, task: Task, answer: Answer) -> Generator[None, None, list[Answer]]:
        """Whether what killed a mode kills the backend without any optimizer too."""
        if answer.signature is None or answer.signature.kind not in ("death", "no end"):
            return [answer]
        yield from self._start()
        whole: list[Answer] = []
        for news in self._asked(replace(task, modes=(WHOLE,))):
            if news is None:
                yield None
            else:
                whole.append(news)
        if whole and whole[0].signature is not None and whole[0].signature.kind == answer.signature.kind:
            return [replace(answer, kind=Kind.BACKEND)]
        return [answer]

    # --------------------------------------------------------------------------------------------- processes

    def _start(self) -> Iterator[None]:
        self._end()
        self._tasks = 0
        store = self._folder / f"store-{time.monotonic_ns()}"
        for rank in range(self.nproc):
            self._processes.append(_started(Seat(rank, self.nproc, store, self._folder / f"rank-{rank}.log")))
        since, waiting = time.monotonic(), set(range(self.nproc))
        while waiting:
            for rank in sorted(waiting):
                news = _received(self._processes[rank])
                if isinstance(news, Began):
                    waiting.discard(rank)
                if isinstance(news, _Dead) or time.monotonic() - since > STARTING_LIMIT_S:
                    words = self._logs()[-2000:]
                    self._end()
                    raise InfrastructureError(f"a worker did not start; what it printed:\n{words}")
            yield None

    def _death(self) -> tuple[Signature, str]:
        """What became of the process that died first: of a signal if one did, for its peers merely fail."""
        for each in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(STACKS_S)
        codes = [code for each in self._processes if (code := each.process.returncode) is not None]
        code = min(codes, default=0)
        logs = self._logs()
        self._end()
        how = signal.Signals(-code).name if code < 0 else f"{BY_EXCEPTION} {code}"
        return of_death(how, logs), f"the process died of {how}\n{_innermost(logs)}"

    def _stalled(self) -> tuple[Signature, str]:
        for each in self._processes:
            each.process.send_signal(signal.SIGUSR1)  # faulthandler writes all stacks
        time.sleep(min(STACKS_S, self.limit_s))
        logs = self._logs()
        self._end()
        return NO_END, f"no end within {self.limit_s:g} s\n{_innermost(logs)}"

    def _logs(self) -> str:
        return "\n".join(
            each.log.read_text(errors="replace") for each in self._processes if each.log.exists()
        )

    def _end(self) -> None:
        for each in self._processes:
            each.pipe.close()
            each.process.kill()
        for each in self._processes:
            each.process.wait()
        self._processes.clear()


def _innermost(logs: str) -> str:
    """The frames that matter of what faulthandler wrote, or the end of the log."""
    _, found, own = logs.rpartition("Current thread")
    return f"{found}{own}"[:DETAIL] if found else logs[-DETAIL:]


def _started(seat: Seat) -> _Process:
    """Start a process with a pipe to it, in a session of its own: Ctrl-C is for us alone."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", MODULE, str(theirs.fileno()), *seat.arguments]
    process = subprocess.Popen(
        command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
    )
    theirs.close()
    return _Process(process, ours, seat.log)


class _Clock:
    """Time that processes took: of the processor, for machines are busy, and of the wall, for some wait."""

    def __init__(self, processes: Sequence[_Process]) -> None:
        self._processes = processes
        self._wall_s = time.monotonic()
        self._busy_s = self._busy()
        self._looked_s = self._wall_s

    def is_past(self, limit_s: float) -> bool:
        """Whether a process was busy for so long, or all took many times as long."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return False
        self._looked_s = now
        busy = max(after - before for after, before in zip(self._busy(), self._busy_s, strict=True))
        return busy > limit_s or now - self._wall_s > limit_s * PATIENCE

    def _busy(self) -> list[float]:
        return [_processor_s(each.process.pid) for each in self._processes]


def _processor_s(pid: int) -> float:
    """Seconds of the processor that a process took, with those that it started and that ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class _Dead:
    """A process that is gone."""


def _received(each: _Process) -> object:
    """What a process says next; None if it says nothing yet."""
    alive = each.process.poll() is None  # looked at first: what it said before it died counts
    try:
        return each.pipe.recv() if each.pipe.poll(0) else None if alive else _Dead()
    except (EOFError, OSError):
        return _Dead()
