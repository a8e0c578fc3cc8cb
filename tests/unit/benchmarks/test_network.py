"""Tests of `benchmarks.network`: the commands that make a link, and what happens where it cannot be made."""

import subprocess
from typing import Any

import pytest

from benchmarks import network
from benchmarks.network import loopback, two_hosts


def test_a_network_that_refuses_a_command_leads_to_loopback_and_leaves_no_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[Any]] = []

    class Holder(subprocess.Popen[Any]):
        def __init__(self, *_: object, **options: Any) -> None:
            super().__init__(["cat"], **options)
            started.append(self)

    def refuse(command: tuple[str, ...]) -> None:
        raise subprocess.CalledProcessError(2, command, stderr="Error: Specified qdisc kind is unknown.\n")

    monkeypatch.setattr(network, "_missing", lambda: None)
    monkeypatch.setattr(network, "_network", str)
    monkeypatch.setattr(network, "_run", refuse)
    monkeypatch.setattr("subprocess.Popen", Holder)
    with two_hosts("1gbit") as found:
        assert found == loopback("Error: Specified qdisc kind is unknown.")
    assert len(started) == 2
    assert all(holder.returncode is not None for holder in started)
