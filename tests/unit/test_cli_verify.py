"""ddpopt.cli_verify: what it refuses before it starts ranks, and which process writes the reports."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpopt import cli
from ddpopt.cli_verify import is_first
from ddpopt.verify.launch.agent import Agent

TARGETS = """
import torch


def small():
    return torch.nn.Linear(8, 8), torch.randn(4, 8)


def no_model():
    return 5
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    return monkeypatch


def test_a_process_that_torchrun_did_not_start_writes_its_reports_whatever_its_rank(
    environment: pytest.MonkeyPatch,
) -> None:
    assert is_first()


@pytest.mark.parametrize(("rank", "writes"), [("0", True), ("1", False)])
def test_under_torchrun_the_first_rank_alone_writes(
    rank: str, writes: bool, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TORCHELASTIC_RUN_ID", "some")
    environment.setenv("RANK", rank)
    assert is_first() is writes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shop:nothing"], "module 'shop' has no attribute 'nothing'"),
        (["shop:no_model"], "expected it to return (model, inputs)"),
        (["shop:small", "--mode", "ddpopt"], "--mode: expected one of eager, manual"),
        (["shop:small", "--nproc", "0"], "nproc: expected a positive number, got 0"),
        (["shop:small", "--json", "no/such/folder/v.json"], "--json: cannot write"),
        ([], "expected one of TARGET, --matrix and --self-test, got none of them"),
    ],
    ids=lambda value: "" if not isinstance(value, list) else " ".join(value) or "nothing",
)
def test_what_cannot_be_judged_ends_with_2_and_says_why_before_ranks_are_started(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    (tmp_path / "shop.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    monkeypatch.setattr(Agent, "start", started)
    result = CliRunner().invoke(cli.app, ["verify", *arguments], prog_name="ddpopt")
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())
