"""Running ``ddpopt`` in the process of a test."""

import resource
from typing import Any

from typer.testing import CliRunner

from ddpopt.cli.app import app


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
