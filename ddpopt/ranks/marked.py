"""Find the processes of one launch by a mark in their environment, which children inherit.

A process that a rank started may have left its session, lost its parent and changed its name, but it keeps
its initial environment. So this also finds Inductor's workers and a task's own children.

A guardian, a small second process, cleans up if the launcher is killed. It runs this file as a
script, without site-packages, so only Python's own modules may be imported here.

Invariant: only a process that carries the mark is ever signalled.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.02
GUARD_POLL_S = 0.2
# A killed process that still exists after this long hangs in the kernel; nothing can end it.
GONE_LIMIT_S = 5.0


def marked(mark: str) -> list[int]:
    """Find the marked processes.

    Args:
        mark: ``NAME=value``, as in an environment.

    Returns:
        Their process ids, without processes that are dead or belong to another user.
    """
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _carries(pid, mark)]


def _carries(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or not ours
        return False
    return mark.encode() in environment.split(b"\0")


def end_marked(mark: str) -> None:
    """Kill all marked processes, and wait until they are gone.

    Args:
        mark: see `marked`.
    """
    deadline = time.monotonic() + GONE_LIMIT_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            # Checked again right before the kill: a process id that has just become free is not reused
            # immediately.
            if _carries(pid, mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)


@contextlib.contextmanager
def guarded(mark: str, folder: Path) -> Iterator[None]:
    """Kill the marked processes and remove a folder if this process dies inside the block.

    Args:
        mark: see `marked`.
        folder: the folder to remove.
    """
    command = [sys.executable, "-I", "-S", __file__, mark, str(folder), str(os.getpid())]
    # In its own session, so that Ctrl-C in a terminal does not reach it.
    guardian = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        guardian.kill()
        guardian.wait()


def _guard(mark: str, folder: Path, launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(GUARD_POLL_S)
    end_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
