"""ddpopt.ranks.start: Ctrl-C comes out as such, at whatever line it came in while ranks run."""

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ddpopt.ranks import start
from ddpopt.ranks.folder import Start

FILES = (start.__file__, threading.__file__)


class Agent:
    """Starts nothing, and has ended after a few polls."""

    ident = 1

    def __init__(self, command: Sequence[str], size: int, logs: Path) -> None:
        del command, size, logs
        self.ended = threading.Event()
        self.error = None
        self.exit_codes: dict[int, int] = {}
        threading.Timer(3 * start.POLL_S, self.ended.set).start()

    def start(self) -> None:
        """Nothing."""

    def join(self) -> None:
        """Nothing."""


class Interrupt:
    """Ctrl-C before the nth line, or return, of `start` or of what it calls in `threading`."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        del argument
        if frame.f_code.co_filename not in FILES:
            return None
        if event in ("line", "return"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def followed(number: int, folder: Path) -> tuple[type[BaseException] | None, bool]:
    """Follow a run that is interrupted; what came out, and whether it was interrupted at all."""
    run = start._Run(folder, Start([], 0, 1, time.monotonic() + 60, "cpu"), "DDPOPT_NOBODY=1")
    interrupt, before = Interrupt(number), sys.gettrace()
    sys.settrace(interrupt)
    try:
        run.follow(lambda _: None)
    except BaseException as error:
        return type(error), interrupt.left <= 0
    finally:
        sys.settrace(before)
    return None, interrupt.left <= 0


def test_ctrl_c_comes_out_as_such_wherever_it_came_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(start, "Agent", Agent)
    monkeypatch.setattr(start, "POLL_S", 0.001)
    monkeypatch.setattr(start, "end_marked", lambda _: None)
    tried = 0
    for number in range(1, 2000):
        ended, interrupted = followed(number, tmp_path)
        if not interrupted:
            break
        tried += 1
        assert ended is KeyboardInterrupt, f"at event {number}: {ended}"
    assert 20 < tried < 1999
