"""ci.gpu: the page has what the files of a run say, and nothing else."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ci import gpu

MACHINE = {
    "date": "2026-01-02", "commit": "abc", "torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.9",
    "python": "3.11.7", "gpus": ["GPU A"], "ranks": 1, "sends": "nccl",
}  # fmt: skip
GRID = {"title": "A model", "columns": ["mode", "median"], "rows": [["eager", "3"]]}
CLAIMS = [{"held": True, "found": 1.0}, {"held": False, "found": 2.0}, {"held": False, "found": None}]
TESTS = '<testsuite name="a"><testcase name="b"/><testcase name="c"><skipped/></testcase></testsuite>'
FILES: dict[str, Any] = {
    "machine.json": MACHINE,
    "judge.json": {"trials": [{"status": "ok"}, {"status": "wrong"}]},
    "steps.json": {"claims": CLAIMS, "grids": [GRID]},
    "parts/tests.json": {"exit_code": 0, "seconds": 9},
    "parts/judge.json": {"exit_code": 1, "seconds": 9},
    "parts/steps.json": {"exit_code": 1, "seconds": 9},
}


def test_a_part_without_a_result_says_so_and_others_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "tests.xml").write_text(TESTS)
    monkeypatch.setattr(gpu, "KEPT", tmp_path / "kept.txt")
    monkeypatch.setattr(sys, "argv", ["gpu", "page", str(tmp_path)])
    gpu.main()
    assert capsys.readouterr().out == (tmp_path / "kept.txt").read_text() == (
        "Run of 2026-01-02 at abc: GPU A; torch 2.13.0, CUDA 13.0, NCCL 2.28.9, Python 3.11.7; 1 rank(s), "
        "nccl.\n\n"
        "| part | exit code | seconds | result |\n|---|---|---|---|\n"
        "| tests | 0 | 9 | 1 passed, 1 skipped |\n"
        "| judge | 1 | 9 | 1 ok, 1 wrong |\n"
        "| steps | 1 | 9 | 1 held, 1 not held |\n"
        "| trace | did not run | – | no result: FileNotFoundError |\n\n"
        "A model\n\n| mode | median |\n|---|---|\n| eager | 3 |\n\n"
    )  # fmt: skip
