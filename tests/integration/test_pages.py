"""The pages as a reader tries them: each file, snippet and command in turn, within the example project.

A block of Python that begins with the name of a file is that file; any other one runs with the names that its
page speaks of. Each line of a bash block is a command.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpopt

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples/pytest_project"
PAGES = (ROOT / "README.md", PROJECT / "README.md", *sorted(ROOT.glob("docs/*.md")))
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {page.relative_to(ROOT).as_posix(): BLOCK.findall(page.read_text()) for page in PAGES}
del BLOCKS["docs/frameworks.md"]  # lines of examples/, which tests/integration/frameworks compares and runs
SCRIPTS = ("ci/gpu.sh", "ci/multigpu.sh", "ci/releases.sh")
LEFT_OUT = ("pip install", " make ", *SCRIPTS, "cuda", "--store", "gate --baseline")
"""Never run. They need the network (`make wheel-test` installs); run these tests, or take hours (test_docs.py
knows the targets); are two scripts that run tests; need a GPU; write stored figures (a test of
benchmarks/summary.py does so elsewhere); compare this repository's own baseline, as ci/gate.sh does."""
BY_DAY = ("README.md",)
"""What a reader tries first; the others by night."""
MARKS = {page: () if page in BY_DAY else pytest.mark.nightly for page in BLOCKS if BLOCKS[page]}
NIGHTLY = (
    "inductor", "per-node 8", "per-node 4", "fuzz", "minimize", "pytest -n", "-m pytest", "judge_it",
    "backend_page", "ddpopt tune",
)  # fmt: skip
"""Run with --nightly only. By day tests/unit/cli/test_page.py looks at the options of all commands."""
OWN = {
    "my/module.py": "def function(gm, inputs):\n    return gm.forward\n",
    "my_package/models.py": BLOCKS["docs/cases.md"][0][1],
    "ddpopt-fuzz/cases/NAME.json": (ROOT / "tests/data/found/torch-assertionerror-d59749.json").read_text(),
}
"""Files that the pages take for the reader's."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", [pytest.param(page, marks=mark) for page, mark in MARKS.items()])
def test_a_page_works(page: str, tmp_path: Path, pytestconfig: pytest.Config, one_rank_group: None) -> None:
    skipped = LEFT_OUT if pytestconfig.getoption("--nightly") else LEFT_OUT + NIGHTLY
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    shutil.copytree(PROJECT, tmp_path, dirs_exist_ok=True)
    for name, text in OWN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    names = {"ddpopt": ddpopt, "torch": torch, "model": model, "inputs": torch.randn(2, 8), "case": "mlp"}
    for kind, text in BLOCKS[page]:
        for part in [text] if kind == "python" else text.splitlines():
            if any(words in f" {part}" for words in skipped):
                continue
            if file := re.match(r"# (\w+\.py)\n", part):
                (tmp_path / file[1]).write_text(part)
            elif kind == "python":
                exec(part, names)
            else:
                command = part.partition(" #")[0] + " --examples 1 --out $$" * ("ddpopt fuzz" in part)
                done = subprocess.run(
                    command, shell=True, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True
                )
                assert done.returncode == ("tagger" in part), f"{part}\n{done.stdout}\n{done.stderr}"
