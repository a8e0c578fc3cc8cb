"""Start ranks on this machine, give them tasks, watch them and end them.

A pool has one process for each rank. A task is sent to all of them; each sends back notes on its progress,
events, and finally a value or a traceback. If a rank dies or exceeds the limit, the task fails: every process
is ended, and the next task gets new ones.

Invariant: no task outlives its limit by more than moments. When a pool is closed, or the process that holds
it is gone, no process that it started is left, and none that those started.
"""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import cloudpickle
import torch
import torch.distributed as dist

from ddpopt.errors import InfrastructureError, UsageError
from ddpopt.hang.flights import PREFIX, Flight, read
from ddpopt.ranks.black_box import MARGIN_S
from ddpopt.ranks.environment import environment_of_no_rank
from ddpopt.ranks.failures import FailureKind, RankFailure, RanksFailed
from ddpopt.ranks.marked import end_marked, guarded
from ddpopt.ranks.process import ASKED, Host, PickledCall, pickled, serve_in_groups

Value = TypeVar("Value")
OnEvent = Callable[[object], None]

POLL_S = 0.02
# How long the peers of a failed rank may continue before they are asked to end …
PATIENCE_S = 2.0
# … and how long they may take to end before they are killed.
LAST_WORDS_S = 1.0
# How long idle ranks may take to end on their own.
STOP_LIMIT_S = 5.0
KEPT_OUTPUT_BYTES = 2**16
OF_A_LIMIT = "Timeout ("
# Lines of faulthandler's stacks that do not belong to the task: its headline, whose time counts from the last
# limit that was set, its list of modules, and frames of pytest and ddpopt.
OWN_LINES = re.compile(
    r"^(Timeout \(.*\)!|Extension modules: .*"
    r'|  File "[^"]*/(_pytest/|pytest/|pluggy/|ddpopt/testing/|ddpopt/ranks/process\.py).*)\n',
    re.MULTILINE,
)
# Last, the current folder comes first, as with `python -m`: tasks name modules of the user.
BOOT = (
    "import os, sys; from multiprocessing.connection import Connection; "
    "pipe = Connection(int(sys.argv[1])); sys.path[:] = pipe.recv(); "
    "from ddpopt.ranks.process import main; "
    "sys.path.sort(key=lambda entry: entry not in ('', os.getcwd())); main(pipe, sys.argv[2])"
)


def launch(
    task: Callable[..., Value],
    *args: Any,
    nproc: int,
    limit_s: float,
    on_event: OnEvent = lambda _: None,
    device: str | None = "cpu",
) -> list[Value]:
    """Run one task on new ranks, in new processes on this machine.

    Args:
        task: see `Pool.run`.
        *args: arguments of the task.
        nproc: the number of ranks.
        limit_s: seconds that all of this may take; collectives time out somewhat earlier.
        on_event: called in this thread with each object that rank 0 emits.
        device: see `Pool`.

    Returns:
        What the task returned, by rank. Raises: UsageError: if an argument cannot be used. RanksFailed: if a
        rank raised, died or stalled; the message says which, and where. InfrastructureError: if the ranks
        could not be started.
    """
    with Pool(nproc, device=device) as pool:
        return pool.run(task, *args, limit_s=limit_s, on_event=on_event)


class Pool(contextlib.AbstractContextManager["Pool"]):
    """A set of ranks that run one task after another."""

    def __init__(
        self,
        size: int,
        *,
        device: str | None = "cpu",
        host: Host = serve_in_groups,
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        """Create the pool; the first task starts the processes.

        Args:
            size: the number of ranks.
            device: ``"cpu"`` (gloo), ``"cuda"`` (NCCL, one GPU for each rank), or None for CUDA where there
                are enough GPUs.
            host: called once in each rank; it calls `RankProcess.serve`, which runs the tasks.
            prefixes: for each rank, the words before its command, such as ``nsenter …``; none by default.

        Raises:
            UsageError: if an argument cannot be used.
        """
        if size < 1:
            raise UsageError(f"expected at least one rank, got {size!r}")
        self.size = size
        self._device = _checked_device(device, size)
        self._host = cloudpickle.dumps(host)
        self._prefixes = prefixes or [()] * size
        self._ranks: list[_Rank] = []
        self._open = contextlib.ExitStack()
        self._tasks = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether all ranks are running, from an earlier task."""
        return bool(self._ranks) and not any(rank.is_gone() for rank in self._ranks)

    def run(
        self, task: Callable[..., Value], *args: Any, limit_s: float, on_event: OnEvent = lambda _: None
    ) -> list[Value]:
        """Run a task on all ranks.

        Args:
            task: called on each rank as ``task(ranks, *args)``, inside a process group. It is sent with
                cloudpickle, so it may be a lambda, or be defined in a script without a main guard.
            *args: arguments of the task.
            limit_s: seconds that it may take, including the start of the ranks.
            on_event: called with each object that rank 0 emits.

        Returns:
            What the task returned, by rank.

        Raises:
            UsageError: the task or an argument cannot be pickled, or the limit is not above 0.
            RanksFailed: a rank raised, died or stalled; the processes of all ranks have ended.
            InfrastructureError: the ranks could not be started.
        """
        if not limit_s > 0:
            raise UsageError(f"expected limit_s > 0, got limit_s={limit_s!r}")
        data = pickled((task, args), "a task and arguments", "Create inside the task what cannot be pickled.")
        try:
            self._begin(data, limit_s)
            while running := [rank.pipe for rank in self._ranks if not rank.has_ended]:
                wait(running, POLL_S)
                for event in (event for rank in self._ranks for event in rank.listen()):
                    on_event(event)
                self._press()
            self._await_records()
            return self._values()
        except BaseException:
            self.close()
            raise

    def _begin(self, data: bytes, limit_s: float) -> None:
        """Start a task on all ranks."""
        self._end_at = self._deadline = time.monotonic() + limit_s
        if not self.is_running:
            self._start()
        self._tasks += 1
        # Through a file, because a full pipe would make this process wait for the ranks.
        file = self._folder / f"task-{self._tasks}"
        file.write_bytes(data)
        for rank in self._ranks:
            rank.begin((str(file), self._deadline))

    def _values(self) -> list[Any]:
        """The values of all ranks; raises if a rank returned none."""
        failures = [self._failure(rank) for rank in self._ranks if rank.value is None]
        values = {rank.number: cloudpickle.loads(rank.value) for rank in self._ranks if rank.value}
        if failures:
            raise RanksFailed(failures, self.size, values)
        return list(values.values())

    def close(self) -> None:
        """End all ranks and every process that they started."""
        self._open.close()

    def _start(self) -> None:
        self.close()
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="ddpopt-ranks-", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(temporary))
            # A unique name, because a rank may hold a pool too, whose processes carry both marks.
            name = f"DDPOPT_RANKS_{uuid4().hex}"
            mark = f"{name}={self._folder}"
            stack.enter_context(guarded(mark, self._folder))
            c10d: Any = dist  # torch does not mark its re-exports
            self._store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            stack.callback(self._end, mark)
            size = str(self.size)
            environment = {"OMP_NUM_THREADS": "1"} | environment_of_no_rank()
            environment |= {name: str(self._folder), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            try:
                for number, prefix in enumerate(self._prefixes):
                    own = {"RANK": str(number), "LOCAL_RANK": str(number)}
                    rank = _Rank(number, prefix, self._folder, environment | own)
                    rank.send(sys.path)
                    rank.send((self._store.port, self._device, self._host))
                    self._ranks.append(rank)
            except OSError as error:
                raise InfrastructureError(
                    f"expected to start {self.size} ranks on this machine, got {error!r}"
                ) from error
            self._open = stack.pop_all()

    def _end(self, mark: str) -> None:
        for rank in self._ranks:
            rank.pipe.close()  # an idle rank then ends on its own
        deadline = time.monotonic() + STOP_LIMIT_S
        idle = [rank for rank in self._ranks if rank.value is not None]
        while len(idle) == self.size and time.monotonic() < deadline:
            idle = idle if any(not rank.is_gone() for rank in idle) else []
            time.sleep(POLL_S)
        end_marked(mark)
        for rank in self._ranks:
            rank.process.wait()
        self._ranks = []

    def _press(self) -> None:
        """Ask ranks to end if their time is over or a peer has failed; kill them if they do not."""
        now = time.monotonic()
        if any(rank.has_ended and rank.value is None for rank in self._ranks):
            self._end_at = min(self._end_at, now + PATIENCE_S)
        has_failed = self._end_at < self._deadline
        if has_failed or now > self._deadline - MARGIN_S:
            (self._folder / f"{ASKED}-{self._tasks}").touch()
        for rank in self._ranks:
            end_at = self._end_at
            if has_failed and not rank.record.exists():  # the first takes a while; a stopped rank writes none
                end_at = min(end_at + MARGIN_S, self._deadline)
            if now > end_at and not rank.has_ended:
                rank.end(signal.SIGKILL if now > end_at + LAST_WORDS_S else signal.SIGTERM)

    def _await_records(self) -> None:
        """Wait a moment for the records of ranks that have failed and still run."""
        deadline = time.monotonic() + MARGIN_S
        failed = [rank for rank in self._ranks if rank.value is None]
        while time.monotonic() < deadline and not all(one.is_gone() or one.record.exists() for one in failed):
            time.sleep(POLL_S)

    def _failure(self, rank: "_Rank") -> RankFailure:
        """The failure of a rank that ended without a value."""
        code = rank.process.poll()
        stacks = rank.stacks.read_text(errors="replace") if rank.stacks.exists() else ""
        kind: FailureKind = "died"
        if rank.error:
            kind = "raised"
            code = None
        elif stacks.startswith(OF_A_LIMIT):
            kind = "stalled"
        elif rank.was_told_to_end:
            kind = "stalled" if self._end_at == self._deadline else "ended"
        return RankFailure(
            rank=rank.number,
            kind=kind,
            what=rank.doing,
            exit_code=code,
            signal=signal.Signals(-code).name if code is not None and code < 0 else "",
            stack=rank.error or OWN_LINES.sub("", stacks),
            output=rank.output(),
            flight=_flight(rank.record),
        )


class _Rank:
    """One process, and what it has reported about its task.

    Attributes:
        stacks: the file for its stacks.
        record: the file for what torch's flight recorder holds there.
        doing: the last thing it said it was doing.
        value: what its task returned, pickled; None if it has not returned, or raised.
        error: the traceback of its task; empty if it did not raise.
        has_ended: whether it has returned, raised or died.
        was_told_to_end: whether it was still running when the pool asked it to end.
    """

    def __init__(
        self, number: int, prefix: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.number = number
        self.stacks = folder / f"rank-{number}.stacks"
        self.record = folder / f"{PREFIX}{number}"
        self._log = folder / f"rank-{number}.output"
        self.pipe, theirs = Pipe()
        # -P: no module in the working directory shadows the standard library; -u: the last output is not
        # lost.
        command = [*prefix, sys.executable, "-P", "-u", "-c", BOOT, str(theirs.fileno()), str(self.stacks)]
        with theirs, self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C should reach only the process that holds the pool
            )
        self.doing = "starting"
        self.value: bytes | None = None

    def begin(self, task: PickledCall) -> None:
        """Start a task on this rank."""
        self.record.unlink(missing_ok=True)
        self.value = None
        self.error = ""
        self.has_ended = self.was_told_to_end = False
        self._read_before = self._log.stat().st_size
        self.send(task)

    def send(self, message: object) -> None:
        """Send a message to this rank."""
        with contextlib.suppress(OSError):  # `listen` finds out that the process is gone
            self.pipe.send(message)

    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return self.process.poll() is not None

    def listen(self) -> Iterator[object]:
        """Read what the process has sent; yields the events."""
        gone = self.is_gone()  # checked first: what it sent before it died still counts
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll(0):
                said, what = cloudpickle.loads(self.pipe.recv_bytes())
                match said:
                    case "doing" if self.value is None and not self.error:
                        self.doing = what
                    case "event":
                        yield what
                    case "returned":
                        self.value = what
                    case "raised" if self.value is None:
                        self.error = self.error or what
        self.has_ended = gone or self.value is not None or bool(self.error)

    def end(self, number: signal.Signals) -> None:
        """Ask it to end, once, or kill it."""
        if number == signal.SIGKILL or not self.was_told_to_end:
            self.was_told_to_end = True
            self.process.send_signal(number)

    def output(self) -> str:
        """The last output since its task began."""
        with self._log.open("rb") as file:
            file.seek(max(self._read_before, self._log.stat().st_size - KEPT_OUTPUT_BYTES))
            return file.read().decode(errors="replace")


def _flight(file: Path) -> Flight | None:
    """What a rank's recorder held; None if it did not write it in time."""
    with contextlib.suppress(UsageError):
        return read([file])[0]
    return None


def _checked_device(device: str | None, size: int) -> str:
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device is None:
        return "cuda" if gpus >= size else "cpu"
    if device not in ("cpu", "cuda"):
        raise UsageError(f"expected the device 'cpu', 'cuda' or None, got {device!r}")
    if device == "cuda" and gpus < size:
        raise UsageError(
            f"expected a GPU for each of {size} ranks, found {gpus}; ask for fewer ranks, or for device 'cpu'"
        )
    return device
