"""Blocks of the user's own on the command line: drawn, written down, and needed to read a case again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
from ddpopt.testing.drawn import register_block


@register_block("twice")
def twice(w, x):
    return w.assign("doubled", f"{x} * {w.parameter('torch.ones(1)', 'two')}")
"""


def ddpopt(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpopt", *words]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(
        command, cwd=folder, env=alone, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def test_a_campaign_draws_blocks_of_a_module_and_goes_on_only_with_them(folder: Path) -> None:
    words = ("fuzz", "--mode", "ddpopt-split", "--backend", "eager", "--without", "cond", "--out", "out")
    done = ddpopt(folder, *words, "--examples", "10", "--blocks", "mine")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "out" / "journal.jsonl").read_text().splitlines()]
    assert len(lines) == 10
    assert any("twice" in line["features"] for line in lines)
    other = ddpopt(folder, *words, "--examples", "11")
    assert other.returncode == 2
    assert "blocks: ['mine'] there, [] here" in other.stderr


def test_a_module_that_registers_nothing_is_refused(folder: Path) -> None:
    done = ddpopt(folder, "fuzz", "--examples", "1", "--blocks", "empty")
    assert done.returncode == 2
    assert "--blocks: 'empty' registers no block" in done.stderr


def test_a_case_with_a_block_of_a_module_is_read_with_it(folder: Path) -> None:
    case = {
        "version": 1,
        "model": "DrawnModel(steps=(step('twice'),))",
        "mode": "ddpopt-split",
        "setting": {},
        "signature": {"kind": "error", "what": "KeyError", "where": ""},
        "kind": "wrong",
        "features": [],
    }
    (folder / "case.json").write_text(json.dumps(case))
    without = ddpopt(folder, "minimize", "case.json")
    assert without.returncode == 2
    assert "got 'twice'; import the module that registers it (on the command line: --blocks" in without.stderr
    right = ddpopt(folder, "minimize", "case.json", "--blocks", "mine")
    assert "expected a case that fails as it says" in " ".join(right.stderr.split())
