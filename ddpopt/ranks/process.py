"""What runs in a process that `ddpopt.ranks.group.launch` started: one rank, one task.

Invariant: a rank writes down how its task ended before it tears anything down, and it is gone soon after the
limit of its run, or after the death of the process that launched it, whatever its task does.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddpopt.errors import UsageError
from ddpopt.ranks.folder import EventWriter, RankFiles, Start, await_ends, read_start
from ddpopt.ranks.limits import Limits

if TYPE_CHECKING:
    from ddpopt.ranks.group import Ranks

__all__ = ["main"]

# How long a rank that failed stays, so that peers that fail too can say so before they are ended.
PATIENCE_WITH_PEERS_S = 2.0
# A collective that a peer never enters ends before the run: its exception passes through the task.
COLLECTIVE_SHARE = 0.8
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(folder_name: str) -> None:
    """Run the task that lies in a folder, as the rank that the environment says; does not return.

    Args:
        folder_name: of the launch.
    """
    folder = Path(folder_name)
    start = read_start(folder)
    _end_with(start.launcher)
    files = [RankFiles(folder, rank) for rank in range(start.size)]
    own = files[int(os.environ["RANK"])]
    own.pid.write_text(str(os.getpid()))
    limits = _guarded(own)
    with limits.limited(start.deadline - time.monotonic(), "starting"):
        try:
            _run(folder, start, own, limits)
        except BaseException as error:  # sys.exit too: the launcher expects a value
            own.write(own.raised, _traceback(error).encode())
            await_ends(files, PATIENCE_WITH_PEERS_S)
        _leave(0 if own.returned.exists() else 1)


def _end_with(launcher: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it was gone before
        os._exit(1)


def _guarded(own: RankFiles) -> Limits:
    """Have stacks written at a fatal signal, at the signal that ends a rank, and at a limit."""
    # These stay open: what writes to them is C code, at any moment from now on.
    crashed, ended, stalled = (path.open("w") for path in (own.crashed, own.ended, own.stalled))
    faulthandler.enable(crashed)
    faulthandler.register(signal.SIGTERM, ended, all_threads=True, chain=True)
    return Limits(stalled, own.note)


def _traceback(error: BaseException) -> str:
    """Show where a task failed, without the frames of this module that called it."""
    whole = frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or whole))


def _leave(exit_code: int) -> NoReturn:
    """End this process; the interpreter's own way out would wait for whatever the task's threads wait for."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the task may have closed it
            stream.flush()
    os._exit(exit_code)


def _run(folder: Path, start: Start, own: RankFiles, limits: Limits) -> None:
    import torch.distributed as dist

    limits.note("joining the process group")
    ranks = _joined(folder, start, limits)
    limits.note("loading the task")
    task, args = _loaded(folder)
    limits.note("running the task")
    try:
        value = task(ranks, *args)
    except BaseException:
        # Whoever asks this rank to end because a peer is gone hears first what it felt of that.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ranks.leave()
        raise
    limits.note("sending its value")
    own.write(own.returned, _dumped(value))
    limits.note("leaving the process group")
    if dist.is_initialized():
        dist.destroy_process_group()


def _joined(folder: Path, start: Start, limits: Limits) -> Ranks:
    import torch
    import torch.distributed as dist

    from ddpopt.ranks.exchange import default_exchange
    from ddpopt.ranks.group import Ranks

    rank, backend, device = int(os.environ["RANK"]), "gloo", torch.device("cpu")
    if start.device == "cuda":
        backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    left_s = max(start.deadline - time.monotonic(), 0.0)
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_SHARE * left_s))
    exchange = default_exchange(COLLECTIVE_SHARE * left_s)
    return Ranks(rank, start.size, device, backend, exchange, limits, EventWriter(folder).send)


def _loaded(folder: Path) -> Any:
    import cloudpickle

    return cloudpickle.loads((folder / "task.pickle").read_bytes())


def _dumped(value: object) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise UsageError(
            f"expected a task whose value can be pickled, got {type(value).__name__}: {error}. "
            "Return plain data, or tensors."
        ) from error
