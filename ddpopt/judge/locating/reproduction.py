"""Scripts that show a difference by themselves, and running them to see that they do.

A script is tried in a fresh interpreter. It counts as a reproduction only if it ends with 1 and says that the
difference appears: a script that fails for another reason does not. Invariant: what is left on disk is
the first script that showed the difference, or else the last one tried.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

APPEARS = "the difference appears"
REACHED = "eager is done; compiled:"
"""What a script says before it dies, if it does not die for another reason."""


@dataclass(frozen=True)
class Draft:
    """A script that is yet to be tried.

    Attributes:
        kind: what it runs: ``"the segment"``, ``"the model"`` or ``"the data-parallel step"``.
        text: its source code.
        tensors: what it reads from the file next to it; empty if it has none.
        ranks: how many processes it needs.
        death: name of the signal or exit code of which a process dies, if that is the difference.
    """

    kind: str
    text: str
    tensors: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    death: str = ""


@dataclass(frozen=True)
class Written:
    """What is on disk.

    Attributes:
        script: name of the file; empty if none was written.
        reproduces: whether it showed the difference in a fresh interpreter.
        note: what a reader should know of it.
    """

    script: str = ""
    reproduces: bool = False
    note: str = ""


def write(script: Path, drafts: Sequence[Draft], time_left: Callable[[], float]) -> Written:
    """Write the first draft that shows the difference.

    Args:
        script: where to; tensors go next to it, with the suffix ``.pt``.
        drafts: in order of preference.
        time_left: how much time is left for trying, in seconds.

    Returns:
        What is on disk now.

    Raises:
        OSError: a script, or what it reads, cannot be written, or no process can be started.
    """
    written = Written()
    for draft in drafts:
        if written.script and time_left() <= 0:
            return replace(written, note=f"{written.note}; no time was left to try others".lstrip("; "))
        _put(script, draft)
        written = Written(script.name, note=_about(draft))
        if time_left() <= 0:
            return replace(written, note=f"{written.note}; no time was left to run it".lstrip("; "))
        if shows(script, draft.ranks, time_left(), death=draft.death):
            return replace(written, reproduces=True)
    return written


def _about(draft: Draft) -> str:
    parts = [f"the script runs {draft.kind}"]
    if draft.ranks > 1:
        parts.append(f"it needs {draft.ranks} ranks: {command_of(draft.ranks)}")
    if draft.tensors:
        parts.append("it reads what it needs from the file next to it")
    return "; ".join(parts)


def _put(script: Path, draft: Draft) -> None:
    script.write_text(draft.text, encoding="utf-8")
    beside = script.with_suffix(".pt")
    if draft.tensors:
        with beside.open("wb") as file:  # opened here: torch's own error is no OSError
            torch.save(draft.tensors, file)
    else:
        beside.unlink(missing_ok=True)


def shows(script: Path, ranks: int, limit_s: float, *, death: str = "") -> bool:
    """Run a script in a fresh interpreter, or under torchrun.

    Args:
        script: the file.
        ranks: how many processes it needs.
        limit_s: seconds after which it is ended.
        death: name of the signal, or ``"exit code N"``, of which a process dies, if that is the difference.

    Returns:
        Whether it ended with 1 and said that the difference appears; or, if that is the difference, died so
        after eager was done.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(script)]
    process = subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end(process)
    if death:
        return REACHED in output and _died(process.returncode, death, output if ranks > 1 else "")
    return process.returncode == 1 and APPEARS in output


def _environment() -> dict[str, str]:
    """This process's, without what torchrun gave it, if it is a rank of torchrun's."""
    own = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
    ends = ("_RANK", "_WORLD_SIZE")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.endswith(ends) and not name.startswith("TORCHELASTIC_")
    }


def _died(exit_code: int, death: str, told_by_torchrun: str) -> bool:
    """Whether a process ended of what is given, or torchrun says of one of its ranks that it did."""
    if told_by_torchrun:
        signs = (f"({death})", f"exitcode  : {death.removeprefix('exit code ')} ")
        return any(sign in told_by_torchrun for sign in signs)
    return death == (signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that is still there, with those that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def command_of(ranks: int) -> str:
    """How a script for so many ranks is run."""
    return "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
