"""What a launcher and the ranks that it started tell each other: files in one folder of that launch.

Files outlive the process that wrote them, whatever ended it, and need no thread and no lock of Python's; so a
rank that was killed, or that hangs inside C, has still said all that it had to say.

Invariant: each file has one writer. A reader sees a whole value, traceback, note or event, or none.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import cloudpickle

__all__ = ["EventReader", "EventWriter", "RankFiles", "Start", "await_ends", "read_start", "write_start"]

LENGTH_BYTES = 8
KEPT_OUTPUT_BYTES = 2**16
POLL_S = 0.02


@dataclass(frozen=True)
class Start:
    """What a rank must know before it can load its task.

    Attributes:
        path: ``sys.path`` of the launcher.
        launcher: its process id; a rank ends when it is gone.
        size: how many ranks there are.
        deadline: when the run is over, in seconds of ``time.monotonic()``, one clock for all processes.
        device: ``"cpu"`` or ``"cuda"``.
    """

    path: list[str]
    launcher: int
    size: int
    deadline: float
    device: str


def write_start(folder: Path, start: Start, task: bytes) -> None:
    """Lay out what ranks read when they start.

    Args:
        folder: an empty folder.
        start: for all ranks.
        task: the pickled pair of task and arguments.
    """
    (folder / "task.pickle").write_bytes(task)
    (folder / "start.json").write_text(json.dumps(asdict(start)))


def read_start(folder: Path) -> Start:
    """Read what the launcher wrote.

    Args:
        folder: of the launch.
    """
    return Start(**json.loads((folder / "start.json").read_text()))


class RankFiles:
    """The files of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self.returned = self._path("returned")
        """The pickled value of its task."""
        self.raised = self._path("raised")
        """The traceback of its task."""
        self.stalled = self._path("stalled")
        """Stacks at a limit that was passed."""
        self.crashed = self._path("crashed")
        """Stacks at a fatal signal."""
        self.ended = self._path("ended")
        """Stacks when somebody ended it."""
        self.pid = self._path("pid")
        self._notes = self._path("notes")

    def _path(self, kind: str) -> Path:
        return self._folder / f"rank-{self._rank}.{kind}"

    def note(self, what: str) -> None:
        """Write down what the rank does now."""
        with self._notes.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def last_note(self) -> str:
        """What the rank did last; empty if it never got to say."""
        lines = _text(self._notes).splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return str(json.loads(whole[-1])) if whole else ""

    def write(self, path: Path, data: bytes) -> None:
        """Write one of this rank's files as a whole."""
        draft = self._path("draft")
        draft.write_bytes(data)
        draft.rename(path)

    def has_ended(self) -> bool:
        """Whether the task has ended, one way or the other."""
        return self.returned.exists() or self.raised.exists()

    def failed_at(self) -> float:
        """When the task raised, or the rank was asked to end; infinity if neither."""
        times = [path.stat() for path in (self.raised, self.ended) if path.exists()]
        return min((time.st_mtime for time in times if time.st_size), default=math.inf)

    def output(self) -> str:
        """The end of what the rank printed."""
        path = self._path("output")
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - KEPT_OUTPUT_BYTES))
            return file.read().decode(errors="replace")

    def read(self, path: Path) -> str:
        """One of this rank's texts; empty if it is not there."""
        return _text(path)

    def is_gone(self) -> bool:
        """Whether the process started and is no more."""
        pid = _text(self.pid)
        if not pid:
            return False
        state = _text(Path("/proc") / pid / "stat").rpartition(")")[2].split()
        return not state or state[0] == "Z"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def await_ends(files: Sequence[RankFiles], limit_s: float) -> None:
    """Wait until the task has ended on all ranks, or their processes, or the limit.

    Args:
        files: one for each rank.
        limit_s: seconds to wait at most.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not all(one.has_ended() or one.is_gone() for one in files):
        time.sleep(POLL_S)


class EventWriter:
    """Sends objects to the launcher, in order."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events"

    def send(self, event: object) -> None:
        """Send one object; it has arrived when this returns, whatever becomes of this process."""
        data = cloudpickle.dumps(event)
        with self._path.open("ab") as file:
            file.write(len(data).to_bytes(LENGTH_BYTES) + data)


class EventReader:
    """Receives what an `EventWriter` sent, each object once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "events"
        self._read = 0

    def receive(self) -> Iterator[object]:
        """All objects that have arrived since the last call."""
        if not self._path.exists() or os.path.getsize(self._path) == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            while len(head := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
                length = int.from_bytes(head)
                data = file.read(length)
                if len(data) < length:
                    return
                self._read += LENGTH_BYTES + length
                yield cloudpickle.loads(data)
