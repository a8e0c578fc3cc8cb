"""A rank's pytest has the settings of the pytest that starts it."""

import pytest

from ddpopt.testing.pooled import rank_arguments

pytest_plugins = ["pytester"]


def value_after(command: list[str], option: str) -> list[str]:
    return [command[place + 1] for place, word in enumerate(command) if word == option]


def test_what_matters_while_pytest_loads_is_given_as_arguments(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib -n 4 --junitxml=out.xml")
    config = pytester.parseconfig("-W", "error", "-o", "console_output_style=count", "--tb=native")
    command = rank_arguments(config)
    assert value_after(command, "--import-mode") == ["importlib"]
    assert value_after(command, "-W") == ["error", "ignore::pytest.PytestAssertRewriteWarning"]
    assert value_after(command, "--tb") == ["native"]
    assert value_after(command, "-c") == [str(config.inipath)]
    # No workers and no reports of a rank's own: addopts is emptied, and comes last.
    assert value_after(command, "-o") == ["console_output_style=count", "addopts="]
    assert "-n" not in command
