"""Running ``ddpopt`` in the process of a test."""

from typing import Any

from typer.testing import CliRunner

from ddpopt.cli.app import app


def run(*words: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(app, words, prog_name="ddpopt")
