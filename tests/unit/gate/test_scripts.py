"""The scripts in ci/: what people run and what workflows run are the same, and nothing fails in silence."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "ci").glob("*.sh"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def bash(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_says_what_it_does_and_stops_at_what_fails(script: Path) -> None:
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert lines[1].startswith("# ")
    first = next(line for line in lines[1:] if line and not line.startswith("#"))
    assert first == "set -euo pipefail"
    assert script.stat().st_mode & 0o111
    assert bash(f"bash -n {script}", ROOT).returncode == 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda workflow: workflow.name)
def test_a_workflow_only_calls_what_people_run_too(workflow: Path) -> None:
    text = workflow.read_text()
    commands: list[str] = re.findall(r"\brun: (.*)$", text, re.MULTILINE)
    assert len(commands) == text.count("runs-on:")
    for command in commands:
        program = command.split()[0]
        assert program == "make" or (ROOT / program) in SCRIPTS, command


TWO_FAIL = "step one true; step two false; step three bash -c 'exit 7'"


@pytest.mark.parametrize(
    ("steps", "exit_code", "failed"),
    [("step one true", 0, []), (TWO_FAIL, 1, ["two (exit code 1)", "three (exit code 7)"])],
)
def test_every_step_runs_and_each_that_failed_is_named(
    steps: str, exit_code: int, failed: list[str], tmp_path: Path
) -> None:
    # the environment is there: make has nothing to do, from whatever folder
    (tmp_path / "make").write_text("#!/bin/sh\n")
    (tmp_path / "make").chmod(0o755)
    run = bash(f"PATH={tmp_path}:$PATH; source {ROOT}/ci/environment.sh; {steps}; finish", tmp_path)
    assert run.returncode == exit_code
    assert run.stdout.count("exit code") == steps.count("step ")
    assert [line.partition("failed: ")[2] for line in run.stderr.splitlines()] == failed


def test_ranks_that_are_no_number_are_refused(tmp_path: Path) -> None:
    run = bash(f"{ROOT}/ci/multigpu.sh 2 two", tmp_path)
    assert run.returncode == 2
    assert run.stderr == "ci/multigpu.sh: expected numbers of ranks, got 'two'\n"
