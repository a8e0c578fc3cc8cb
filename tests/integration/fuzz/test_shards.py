"""Several processes at one campaign, started by torchrun or pytest-xdist: each judges models of its own."""

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpopt.fuzz.journal import LINES, PLAN, Entry
from ddpopt.fuzz.stream import Source
from ddpopt.testing.drawn import DrawnModel

SEED, EXAMPLES = 5, 3
FUZZ = [
    *("-m", "ddpopt", "fuzz", "--mode", "ddpopt-inline", "--backend", "eager", "--workers", "1"),
    *("--seed", str(SEED), "--examples", str(EXAMPLES)),
]
Launched = Callable[[list[str], Path], list[str]]
IN_A_TEST = """
import subprocess, sys

def test_fuzz():
    subprocess.run([sys.executable, *{arguments!r}], check=True)
"""


def under_torchrun(arguments: list[str], folder: Path) -> list[str]:
    del folder
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, "--no-python", sys.executable, *arguments]


def under_xdist(arguments: list[str], folder: Path) -> list[str]:
    test = folder / "test_fuzz.py"
    test.write_text(IN_A_TEST.format(arguments=arguments))
    # "each": both workers run the test
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]
    return [sys.executable, "-m", "pytest", *options, "--dist", "each", "--tx", "2*popen", str(test)]


@pytest.mark.parametrize("launched", [under_torchrun, under_xdist])
def test_each_process_judges_the_models_of_its_number(launched: Launched, tmp_path: Path) -> None:
    out = tmp_path / "found"
    command = launched([*FUZZ, "--out", str(out)], tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}:\n{done.stdout}\n{done.stderr}"
    assert [folder.name for folder in sorted(out.iterdir())] == ["shard-0", "shard-1"]
    judged: list[list[DrawnModel]] = []
    for shard in range(2):
        folder = out / f"shard-{shard}"
        assert json.loads((folder / PLAN).read_text())["shard"] == shard
        entries = [Entry.from_line(line) for line in (folder / LINES).read_text().splitlines()]
        drawn = [model for _, model in itertools.islice(Source(SEED, shard).models(), EXAMPLES)]
        assert [entry.features for entry in entries] == [tuple(sorted(model.features)) for model in drawn]
        judged.append(drawn)
    assert judged[0] != judged[1]
