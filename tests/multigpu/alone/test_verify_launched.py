"""``ddpopt verify`` as people run it, where ranks are right, wrong, stall, or are torchrun's.

What counts is its exit codes, what it writes, and that nothing is left.
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import TWO_RANKS, python

pytestmark = pytest.mark.timeout(240)

MODELS = """
import torch
from torch import nn
from torch._dynamo import register_backend


def small():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)


@register_backend
def doubling(gm, inputs):
    return lambda *args: tuple(value * 2 if torch.is_tensor(value) else value for value in gm(*args))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with models that people might have, as the module ``shop``."""
    (tmp_path / "shop.py").write_text(MODELS)
    return tmp_path


def run(folder: Path, *arguments: str, ranks: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run ``ddpopt verify`` in a folder, on ranks of its own or on two of torchrun's."""
    return python(*ranks, "-m", "ddpopt", "verify", *arguments, folder=folder)


@pytest.mark.parametrize("located", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_backend_that_is_wrong_ends_with_1_and_is_located(located: bool, folder: Path) -> None:
    options = () if located else ("--no-locate",)
    done = run(folder, "shop:small", "--backend", "doubling", "--json", "v.json", *options)
    assert done.returncode == 1, done.stderr
    verdict = json.loads((folder / "v.json").read_text())
    assert "L2" in {finding["level"] for trial in verdict["trials"] for finding in trial["findings"]}
    if located:
        assert any(rung["agrees"] is False for rung in verdict["location"]["rungs"])
        assert verdict["location"]["reproduces"]


def test_under_torchrun_its_ranks_are_used_and_one_of_them_reports(folder: Path) -> None:
    files = ["--json", "v.json", "--report", "v.xml", "--report", "v.html"]
    done = run(folder, "shop:small", "--backend", "eager", *files, ranks=TWO_RANKS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RIGHT: shop:small on 2 ranks") == 1
    assert all((folder / name).stat().st_size > 100 for name in ("v.json", "v.xml", "v.html"))
