"""``ddpopt verify`` and ``matrix``: what they ask for, what they refuse, and which process writes reports."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddpopt.cases.matrix import CASES
from ddpopt.cli import verification
from ddpopt.errors import InfrastructureError
from ddpopt.judge.engines.modes import MODES
from ddpopt.judge.training.options import OPTIONS
from ddpopt.judge.trials.on_rank import Request, Settings
from ddpopt.judge.trials.runner import is_first
from ddpopt.judge.verdict import Location, Verdict
from tests.support.commands import run, run_where_no_file_can_be_written
from tests.support.verdicts import verdict, wrong_trial


def test_a_process_that_others_than_torchrun_number_writes_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert is_first()


WRONG = verdict(wrong_trial())


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is requested, in place of verifying anything; every verdict is wrong, and located nowhere."""
    received: list[Any] = []

    def verify_all(title: str, requests: list[Request], settings: Settings, **others: Any) -> Verdict:
        others.pop("on_event")
        received.append((requests, settings, others))
        return WRONG

    def locate(*arguments: Any, **keywords: Any) -> Location:
        received.append((arguments, keywords))
        return Location((), "found")

    monkeypatch.setattr(verification, "verify_all", verify_all)
    monkeypatch.setattr(verification, "locate", locate)
    return received


def test_each_option_of_verify_is_what_is_asked_for(requested: list[Any]) -> None:
    words = "--nproc 3 --backend eager --mode torch,whole --options default,join --steps 5 --dtype bfloat16"
    result = run("verify", "tied", *words.split(), "--device", "cpu", "--timeout", "7", "--no-locate")
    assert result.exit_code == 1
    ((found, settings, others),) = requested
    assert found == [Request("tied", option, ("torch", "whole")) for option in ("default", "join")]
    assert settings == Settings("eager", 5, "bfloat16", 7.0)
    assert others == {"nproc": 3, "device": "cpu", "limit_s": 7.0 * 6}


def test_verify_alone_asks_for_ddpopts_own_choice_and_looks_where_it_fails(requested: list[Any]) -> None:
    result = run("verify", "tied", "--ddp", "bucket_cap_mb=2")
    assert "looking for where it goes wrong" in result.stderr
    ((one,), settings, _), (arguments, keywords) = requested
    assert (one.modes, one.option) == (("ddpopt-inline",), "default")
    assert one.target.ddp_kwargs == {"bucket_cap_mb": 2}
    assert settings == Settings("aot_eager", 3, None, 300.0)
    assert arguments == ("tied", wrong_trial(), Path("ddpopt_reproduction.py"))
    assert (keywords["nproc"], keywords["ddp_kwargs"]) == (2, {"bucket_cap_mb": 2})


def test_the_matrix_asks_for_every_mode_under_every_option_on_six_cases(requested: list[Any]) -> None:
    run("matrix")
    ((found, _, _),) = requested
    assert len(CASES) == 6
    assert sum(len(one.modes) for one in found) == len(MODES) * len(OPTIONS) * len(CASES)


@pytest.mark.usefixtures("requested")
def test_a_failed_search_or_device_costs_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=InfrastructureError("no rank could be started"))
    monkeypatch.setattr(verification, "locate", failing)
    summary = tmp_path / "summary"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    reports = [tmp_path / "v.xml", tmp_path / "v.html", tmp_path / "v.md", summary]
    words = [word for file in reports for word in ("--report", str(file))]
    words += ["--json", str(tmp_path / "v.json")]
    full = run_where_no_file_can_be_written("verify", "tied", *words)
    assert (full.exit_code, "none was found: the search failed" in full.stdout) == (2, True)
    assert f"error: --report: cannot write '{reports[0]}': File too large; name another" in full.stderr
    assert all(file.exists() for file in reports)  # each was tried
    result = run("verify", "tied", *words)
    assert result.exit_code == 1, result.output
    location = Location((), "none was found: the search failed", note="no rank could be started")
    assert (tmp_path / "v.json").read_text() == f"{replace(WRONG, location=location).to_json()}\n"
    assert "<testsuites" in reports[0].read_text()
    assert "<!DOCTYPE html>" in reports[1].read_text()
    assert "WRONG: pkg.module:model on 2 ranks" in reports[2].read_text()
    assert summary.read_text() == f"before\n{reports[2].read_text()}"
    assert "no rank could be started" in " ".join(result.stdout.split())
