"""``ddpopt gate`` as people run it: on ranks that it starts, against a baseline that it wrote itself."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpopt.cli import app as cli

pytestmark = pytest.mark.timeout(240)

SHOP = """
import os
import torch
from torch import nn


class Shop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(300, 300) for _ in range(5))

    def forward(self, x):
        x = self.layers[0](x).relu()
        if "SHOP_BREAKS" in os.environ:
            torch._dynamo.graph_break()
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return x


def make():
    return Shop(), torch.randn(4, 300)
"""


def run(*args: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(cli.app, ["gate", *args], prog_name="ddpopt")


@pytest.mark.nightly  # the gate itself: tests/integration/gate/test_regressions.py
def test_a_users_own_model_is_gated_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gated.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert "SHOP_BREAKS" not in os.environ
    options = ["--mode", "ddpopt-inline"]
    written = run("gated:make", "--baseline", "baseline.json", "--update", *options)
    assert written.exit_code == 0, written.output
    text = Path("baseline.json").read_text()
    (figures,) = json.loads(text)["measured"].values()
    found = figures["gated:make"]["ddpopt-inline"]
    assert (found["graphs"], found["recompiles"], found["planned = observed buckets"]) == (1, 0, "yes")
    assert found["collectives of a backward"] == "2 allreduce"
    assert found["overlap, as a share of eager DDP's"] >= 0.98

    monkeypatch.setenv("SHOP_BREAKS", "1")
    moved = run("--baseline", "baseline.json")
    assert moved.exit_code == 1, moved.output
    assert "gated:make, ddpopt-inline\n  graphs: 1 before, 2 now" in moved.stdout
    assert Path("baseline.json").read_text() == text

    monkeypatch.delenv("SHOP_BREAKS")
    again = run("--baseline", "baseline.json", "--update")
    assert again.exit_code == 0, again.output
    assert "nothing to change in baseline.json" in again.stderr
    assert Path("baseline.json").read_text() == text
