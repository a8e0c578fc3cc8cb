"""``ddpopt verify --self-test``: what it takes, what it refuses, and the reports that it writes."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpopt.cli import app as cli
from ddpopt.judge.injected.trials import Found
from ddpopt.judge.self_test import SelfTest
from ddpopt.judge.verdict import Status, Trial, Verdict


def run(*args: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(cli.app, args, prog_name="ddpopt")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--backend", "inductor"], "--backend"),
        (["--mode", "torch", "--options", "all", "--no-locate"], "--mode, --options, --locate"),
        (["--static-graph", "--steps", "3"], "--static-graph, --steps"),
    ],
)
def test_a_self_test_refuses_what_it_would_ignore(arguments: list[str], named: str) -> None:
    result = run("verify", "--self-test", *arguments)
    assert result.exit_code == 2
    assert result.stderr == (
        f"ddpopt: error: --self-test: expected --nproc and files for reports beside it, got {named}; "
        "it has cases, modes and options of its own\n"
    )


@pytest.mark.parametrize("option", ["--json", "--junit", "--html"])
def test_a_self_test_fails_before_it_starts_where_a_report_cannot_be_written(option: str) -> None:
    result = run("verify", "--self-test", option, "no/such/folder/report")
    assert result.exit_code == 2
    assert f"{option}: cannot write 'no/such/folder/report'" in result.stderr


def test_a_self_test_writes_every_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found("a gradient is zeroed", "compiled code", True, ("L0",), ("L0",), "off", "m", "b")
    clean = Verdict("clean runs", 3, (Trial("tied", "m", "default", "b", Status.OK),))
    module = importlib.import_module("ddpopt.judge.self_test")
    monkeypatch.setattr(module, "self_test", lambda nproc, on_event: SelfTest((found,), clean, nproc))
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    files = {option: tmp_path / option for option in ("--json", "--junit", "--html")}
    told = [part for option, file in files.items() for part in (option, str(file))]
    result = run("verify", "--self-test", "--nproc", "3", "--github", *told)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 of 1 fault found on 3 ranks" in result.stdout
    assert all("a gradient is zeroed" in file.read_text() for file in (*files.values(), summary))
