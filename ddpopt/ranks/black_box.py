"""A thread in each rank that writes what torch's flight recorder holds, shortly before the rank is ended.

At a hard limit a process ends inside C, where no line of Python runs any more, and a rank that waits in a
collective runs none either. So a thread of its own writes the record: when a limit is near, or when somebody
asks because another rank has failed.

Invariant: a record belongs to the limit that ended the rank, or to the question; one of a limit that was kept
is removed.
"""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddpopt.hang.flights import PREFIX
from ddpopt.hang.recorder import save
from ddpopt.ranks.limits import earliest_end

POLL_S = 0.2
FOLDER = "ddpopt-hang"
"""Where ranks of torchrun write their records."""
ASKED = 0.0
_WRITING = threading.Lock()
MARGIN_S = 3.0
"""How long before a limit the record is written: the first takes up to two seconds."""


@contextlib.contextmanager
def keeping_record(
    folder: Path,
    rank: int,
    *,
    is_asked: Callable[[], bool] = lambda: False,
    tell: Callable[[Path], None] = lambda _: None,
) -> Iterator[None]:
    """Have the thread run during a block.

    Args:
        folder: where the record ``rank_N`` is written, in torch's format.
        rank: the rank of this process.
        is_asked: whether somebody asks for the record now.
        tell: called with the record when it has been written.
    """
    over = threading.Event()
    keep = functools.partial(_keep, folder, rank, is_asked, tell, over)
    thread = threading.Thread(target=keep, name="ddpopt-black-box", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def keeping_record_of_launched(rank: int) -> contextlib.AbstractContextManager[None]:
    """The same on a rank that torchrun started, with the record in the current folder.

    Args:
        rank: the rank of this process.
    """
    return keeping_record(Path(FOLDER), rank, tell=_tell)


def _tell(record: Path) -> None:
    said = f"what this rank sent is in {record}, and 'ddpopt hang {record.parent}' compares ranks"
    sys.stderr.write(f"ddpopt: a time limit is near; {said}\n")


def _keep(
    folder: Path,
    rank: int,
    is_asked: Callable[[], bool],
    tell: Callable[[Path], None],
    over: threading.Event,
) -> None:
    written_for: float | None = None  # when the limit in force ends, or ASKED; None if there is no record
    while not over.wait(POLL_S):
        end = earliest_end()
        is_near = end is not None and time.monotonic() > end - MARGIN_S
        near_end = end if is_near else None
        reason = ASKED if is_asked() else near_end
        if reason == written_for:
            continue
        if reason is None:
            (folder / f"{PREFIX}{rank}").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()  # unless it holds something else
        else:
            tell(written(folder, rank))
        written_for = reason


def written(folder: Path, rank: int) -> Path:
    """Write the record now; a rank that is about to end must not fail at that.

    Args:
        folder: where ``rank_N`` is written.
        rank: the rank of this process.

    Returns:
        The file, which is empty if there is nothing to record.
    """
    file = folder / f"{PREFIX}{rank}"
    with contextlib.suppress(Exception), _WRITING:
        if "torch.distributed.distributed_c10d" in sys.modules:
            if "torch._dynamo" not in sys.modules:
                save(folder, rank, stacks=False)  # at once; an import may take longer than there is time
            return save(folder, rank)
    with contextlib.suppress(OSError):
        file.touch()
    return file
