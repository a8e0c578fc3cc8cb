"""The code in each process of a `ddpopt.ranks.pool.Pool`: one rank, one task after another.

Invariant: a rank reports how its task ended before it tears anything down, and ends when its pool is closed.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import cloudpickle

from ddpopt.errors import UsageError
from ddpopt.ranks.black_box import keeping_record, written
from ddpopt.ranks.environment import own_rank, own_size
from ddpopt.ranks.limits import Limits

if TYPE_CHECKING:
    from ddpopt.ranks.group import Ranks

# A collective that a peer never enters times out before the task does, so the task sees its exception.
COLLECTIVE_SHARE = 0.8
ASKED = "asked"
"""With the number of a task, the name of the file with which the pool asks for records."""

PickledCall = tuple[str, float]
"""The name of a file with a pickled function and its arguments, and the deadline by ``time.monotonic()``."""
Host = Callable[["RankProcess"], None]


class RankProcess:
    """This process, as a rank of a pool.

    Attributes:
        number: number of the running task.
    """

    def __init__(
        self, pipe: "Connection[Any, Any]", port: int, device: str, stacks: IO[str], folder: Path
    ) -> None:
        """Store the connection; sends nothing yet.

        Args:
            pipe: connection to the pool.
            port: port of the store that the pool holds.
            device: ``"cpu"`` or ``"cuda"``.
            stacks: the file to write stacks to.
            folder: the folder for what torch's flight recorder holds.
        """
        self.number = 0
        self._pipe = pipe
        self._port = port
        self._folder = folder
        self._backend = "nccl" if device == "cuda" else "gloo"
        self._limits = Limits(stacks, partial(self._say, "doing"))

    @cached_property
    def store(self) -> Any:
        """The store that the ranks share with the pool, which is on this machine."""
        import torch.distributed as dist

        c10d: Any = dist  # torch does not mark its re-exports
        return c10d.TCPStore("127.0.0.1", self._port, is_master=False)

    def serve(self, around: Callable[[float], AbstractContextManager[Any]]) -> None:
        """Run tasks until the pool is closed.

        Args:
            around: context manager entered around each task; called with the seconds left, yields the task's
                first argument.
        """
        with contextlib.suppress(EOFError):
            while True:
                file, deadline = self._pipe.recv()
                self.number += 1
                self._run(Path(file), around(deadline - time.monotonic()))

    def joined(
        self, timeout_s: float, store: Any = None, backend: str | None = None
    ) -> "AbstractContextManager[Ranks]":
        """Make a process group for one task.

        Args:
            timeout_s: limit of each collective and gather.
            store: the store in which the ranks meet; by default `store`.
            backend: ``"gloo"`` or ``"nccl"``; by default the one that fits the pool's device.
        """
        from torch.distributed.distributed_c10d import PrefixStore

        from ddpopt.ranks.group import grouped

        self._limits.note("joining the process group")
        seat = (PrefixStore(f"task/{self.number}", store or self.store), own_rank(), own_size())
        send = partial(self._say, "event")
        return grouped(timeout_s, seat, backend=backend or self._backend, limits=self._limits, send=send)

    def _run(self, file: Path, around: AbstractContextManager[Any]) -> None:
        # The first report counts: leaving the group may fail after the task has raised.
        with self.telling_errors():
            with around as given, self.telling_errors():
                self._limits.note("loading the task")
                task, args = cloudpickle.loads(file.read_bytes())
                self._limits.note("running the task")
                value = task(given, *args)
                self._limits.note("sending its value")
                sent = pickled(value, f"a {type(value).__name__}", "Return plain data, or tensors.")
                self._limits.note("leaving the process group")
            # only now: a task whose group cannot be left has not ended well
            self._say("returned", sent)

    @contextlib.contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Send the traceback of an exception to the pool."""
        try:
            yield
        except BaseException:  # including sys.exit: the pool expects a value
            # Report this exception even if the pool asks this rank to end because a peer is gone.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._say("raised", traceback.format_exc())
            written(self._folder, own_rank())
            raise

    def _say(self, kind: str, what: object) -> None:
        self._pipe.send_bytes(cloudpickle.dumps((kind, what)))


def serve_in_groups(process: RankProcess) -> None:
    """Run each task in its own process group."""
    process.serve(lambda left_s: process.joined(COLLECTIVE_SHARE * max(left_s, 0.0)))


def main(pipe: "Connection[Any, Any]", stacks_name: str) -> None:
    """Run as a rank; does not return.

    Args:
        pipe: to the pool.
        stacks_name: name of the file that gets the stacks at a fatal signal, at a limit and at the signal to
            end.
    """
    stacks = Path(stacks_name).open("w")  # noqa: SIM115  # C code writes to it, at any moment from now on
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
    with contextlib.suppress(BaseException):
        port, device, host = pipe.recv()
        folder = Path(stacks_name).parent
        process = RankProcess(pipe, port, device, stacks, folder)
        recorded = keeping_record(
            folder, own_rank(), is_asked=lambda: (folder / f"{ASKED}-{process.number}").exists()
        )
        with recorded, process.telling_errors():
            cloudpickle.loads(host)(process)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a task may have closed it
            stream.flush()
    os._exit(0)  # a normal exit would join the threads of a task, which may never end


def pickled(value: object, what: str, advice: str) -> bytes:
    """Pickle something that is sent between processes.

    Args:
        value: pickled by cloudpickle.
        what: the expected kind of value, for the error.
        advice: advice to the user, for the error.

    Raises:
        UsageError: the value cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UsageError(f"expected {what} that can be pickled, got {error}. {advice}") from error
