"""How a rank's pytest comes to have the settings of the pytest that starts it.

What matters while pytest loads stands on the command line. All other options, those of the user's conftest.py
among them, travel as JSON and are set when the rank's session starts: too late for plugins that write reports
or start workers, which must do nothing in a rank, and in time for collection and tests.
"""

import json
import sys
from collections.abc import Sequence

import pytest

__all__ = ["options_as_text", "rank_command", "set_options"]

# A rank's reports travel as text, so one style has to serve all of them.
RANKS_OWN = ("tbstyle",)


def rank_command(config: pytest.Config, files: Sequence[str]) -> list[str]:
    """Give the command line of a rank.

    Args:
        config: of the pytest that starts it.
        files: to collect.

    Returns:
        The program and its arguments.
    """
    option = config.option
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # What a rank prints stands in its report, and in its output should it give none.
    command += ["--capture", "tee-sys", "--tb", "short" if option.tbstyle == "auto" else option.tbstyle]
    command += ["--rootdir", str(config.rootpath), "--import-mode", option.importmode]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    # addopts may start workers, or write files that are not a rank's to write; what it set travels below.
    for setting in (*(option.override_ini or ()), "addopts="):
        command += ["-o", setting]
    for plugin in option.plugins or ():
        command += ["-p", plugin]
    for warning in option.pythonwarnings or ():
        command += ["-W", warning]
    return [*command, *files]


def options_as_text(config: pytest.Config) -> str:
    """Write options down for a rank.

    Args:
        config: of the pytest that starts it.

    Returns:
        JSON, of all options that JSON can hold.
    """
    options = {name: value for name, value in vars(config.option).items() if _is_plain(value)}
    return json.dumps({name: value for name, value in options.items() if name not in RANKS_OWN})


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def set_options(config: pytest.Config, text: str) -> None:
    """Set the options that `options_as_text` wrote down.

    Args:
        config: of the rank.
        text: JSON.
    """
    vars(config.option).update(json.loads(text))
