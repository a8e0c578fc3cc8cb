"""The flight recorder of this process, written to a file while it trains.

Invariant: a file is whole at any moment, also if the process is killed or stopped while it is written.
"""

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.hang.flights import PREFIX, Flight, flight_of

EVERY_S = 2.0


@contextlib.contextmanager
def recording(folder: str | Path, *, rank: int | None = None, every_s: float = EVERY_S) -> Iterator[None]:
    """Keep a file with what this rank has sent, for `ddpopt hang` and torch's ``torchfrtrace``.

    A thread writes it every few seconds, and once more at the end of the block, so it is also there if this
    process is killed, stopped or aborted.

    Args:
        folder: where ``rank_N`` is written; made if it does not exist. Each rank may have its own.
        rank: the rank of this process; by default that of the default process group, or ``RANK``.
        every_s: how often it is written, in seconds.

    Raises:
        UsageError: the rank is not known.
        UnsupportedError: this build of torch has no flight recorder.
    """
    number = _own_rank() if rank is None else rank
    _dump()  # before the thread starts: it has nobody to tell
    over = threading.Event()

    def write() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(OSError):  # a full disk is no reason to end a training
                save(folder, number)

    thread = threading.Thread(target=write, name="ddpopt-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        save(folder, number)


def save(folder: str | Path, rank: int, *, stacks: bool = True) -> Path:
    """Write what the recorder of this process holds.

    Args:
        folder: where the file ``rank_N`` is written; made if it does not exist.
        rank: the rank of this process.
        stacks: whether with the Python stack of each collective, for which torch imports Dynamo.

    Returns:
        The file.
    """
    file = Path(folder) / f"{PREFIX}{rank}"
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".writing-{os.getpid()}")  # neither tool takes it for a dump
    unfinished.write_bytes(pickle.dumps(_dump(stacks=stacks)))
    unfinished.replace(file)
    return file


def current(rank: int, last: int) -> Flight:
    """What the recorder of this process holds.

    Args:
        rank: the rank of this process.
        last: how many collectives to keep at most.
    """
    return flight_of(_dump(), rank, last)


def _dump(*, stacks: bool = True) -> dict[str, Any]:
    """The recorder's dump, with the ranks of each group, which torch adds for NCCL only."""
    import torch  # takes seconds, and reading dumps needs none of it
    import torch.distributed.distributed_c10d as c10d

    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)  # a build of torch may lack it
    if dump is None:
        raise UnsupportedError("hang: this build of torch has no flight recorder for any backend")
    recorded: dict[str, Any] = pickle.loads(dump(includeStackTraces=stacks))  # of this process
    world: Any = c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        name = str(group.group_name)
        about = {"name": name, "desc": str(group.group_desc), "ranks": str(sorted(ranks))}
        recorded["pg_config"][name] = about
    recorded["pg_config"].pop("", None)
    return recorded


def _own_rank() -> int:
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.get_rank()
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    raise UsageError("hang: expected a process group or RANK, got neither; give recording() its rank")
