"""ddpopt.cli.verify: what it refuses before it starts ranks, and which process writes the reports."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddpopt.cli import app as cli
from ddpopt.cli.verify import is_first
from ddpopt.errors import InfrastructureError
from ddpopt.judge.verdict import Location, Verdict
from ddpopt.ranks.pool import Pool
from tests.unit.verdicts import verdict, wrong_trial

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
        (["shop:small", "--reproduction", "no/such/folder/r.py"], "--reproduction: cannot write"),
        (["shop:small", "--options", "default,"], "--options: expected names with commas between"),
        (["shop:small", "--mode", ","], "--mode: expected names with commas between, got ','"),
        (["shop:small", "--options", "none"], "--options: expected one of default, static_graph"),
        (["shop:small", "--timeout", "0"], "--timeout: expected a positive number of seconds, got 0.0"),
        (["shop:small", "--trial-timeout", "-1"], "--trial-timeout: expected a positive number of seconds"),
        (["shop:small", "--locate-timeout", "nan"], "--locate-timeout: expected a positive number of"),
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
    monkeypatch.setattr(Pool, "_start", started)
    result = CliRunner().invoke(cli.app, ["verify", *arguments], prog_name="ddpopt")
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


@pytest.fixture
def judged_wrong(monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """What every verification gives, in place of running any."""
    wrong = verdict(wrong_trial())
    monkeypatch.setattr(importlib.import_module("ddpopt.judge.runner"), "verify_all", lambda *_, **__: wrong)
    return wrong


def verify(*arguments: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(cli.app, ["verify", "tied", *arguments], prog_name="ddpopt")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), InfrastructureError("no rank could be started")]
)
def test_a_search_that_fails_leaves_every_report_with_a_note_why(
    error: Exception, judged_wrong: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("ddpopt.judge.locate"), "locate", failing)
    files = {option: tmp_path / option for option in ("--json", "--junit", "--html")}
    result = verify(*(part for option, file in files.items() for part in (option, str(file))))
    assert result.exit_code == 1, result.output
    location = Location((), "none was found: the search failed", note=str(error))
    assert Verdict.from_json(files["--json"].read_text()) == replace(judged_wrong, location=location)
    assert all(file.stat().st_size > 100 for file in files.values())
    assert str(error).rpartition("] ")[2] in " ".join(result.stdout.split())


def test_a_search_gets_its_limit_and_trials_get_theirs(
    judged_wrong: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def verified(_: str, __: object, settings: Any, **___: object) -> Verdict:
        seen.append(settings.trial_limit_s)
        return judged_wrong

    def located(*arguments: Any, **keywords: Any) -> Location:
        seen.extend((arguments[2], keywords["limit_s"]))
        return Location((), "found")

    monkeypatch.setattr(importlib.import_module("ddpopt.judge.runner"), "verify_all", verified)
    monkeypatch.setattr(importlib.import_module("ddpopt.judge.locate"), "locate", located)
    verify("--trial-timeout", "7", "--locate-timeout", "5")
    assert seen == [7.0, Path("ddpopt_reproduction.py"), 5.0]


def test_annotations_do_not_stand_in_the_json_on_stdout(
    judged_wrong: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    result = verify("--no-locate", "--json", "-", "--github")
    assert Verdict.from_json(result.stdout) == judged_wrong
    assert json.loads(result.stdout)
    assert "::error title=" in result.stderr
    told = verify("--no-locate", "--github")
    assert "::error title=" in told.stdout
    assert "::error" not in told.stderr
