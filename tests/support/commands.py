"""Running ``ddpopt`` in the process of a test, and Python in one of its own."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from ddpopt.cli.app import app
from ddpopt.ranks.environment import environment_of_no_rank

TORCHRUN = ("-m", "torch.distributed.run")
TWO_RANKS = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
"""Words for `python` that have torchrun start two processes with what follows."""


def run(*words: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(app, words, prog_name="ddpopt")


def run_where_no_file_can_be_written(*words: str) -> Any:
    """As on a full device: a folder can be made, and an empty file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        return run(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def python(*words: str, folder: Path | None = None, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A new interpreter that is no rank, in the current folder if in no other: its exit code and output."""
    own = {**environment_of_no_rank(), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=500)
