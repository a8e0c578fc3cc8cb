"""Running a script to see that it shows a difference by itself.

A script is tried in a fresh interpreter. It counts as a reproduction only if it ends with 1 and says that the
difference appears: a script that fails for another reason does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ddpopt.ranks.environment import environment_of_no_rank

APPEARS = "the difference appears"
REACHED = "eager is done; compiled:"
"""What a script says before it dies, if it does not die for another reason."""


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
        env=environment_of_no_rank(),
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
        if process.poll() is None:  # with those that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if death:
        return REACHED in output and _died(process.returncode, death, output if ranks > 1 else "")
    return process.returncode == 1 and APPEARS in output


def _died(exit_code: int, death: str, told_by_torchrun: str) -> bool:
    """Whether a process ended of what is given, or torchrun says of one of its ranks that it did."""
    if told_by_torchrun:
        signs = (f"({death})", f"exitcode  : {death.removeprefix('exit code ')} ")
        return any(sign in told_by_torchrun for sign in signs)
    return death == (signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}")


def command_of(ranks: int) -> str:
    """How a script for so many ranks is run."""
    return "python" if ranks == 1 else f"torchrun --nproc-per-node {ranks}"
