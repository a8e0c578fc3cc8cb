"""Tests of `benchmarks.fuzzing`: what is counted, and when it is too little."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import fuzzing
from benchmarks.fuzzing import Rate, main


def test_the_median_of_the_rounds_is_held_against_what_is_asked() -> None:
    assert Rate("graphs", (90.0, 100.0, 300.0), 100.0).holds
    assert not Rate("graphs", (99.0, 99.9, 300.0), 100.0).holds


def test_graphs_are_judged_after_all_processes_are_ready() -> None:
    ready = threading.Barrier(1)
    assert 0 < fuzzing._judge_graphs(2, 0, ready) < 60


def test_a_model_that_is_wrong_ends_with_1_and_the_command_that_found_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fuzz(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "summary.json").write_text('{"models": 40, "seconds": 10}')
        return subprocess.CompletedProcess([], 1, "", "a mode is wrong")

    monkeypatch.setattr(fuzzing, "_graphs", lambda arguments: (200.0,))
    monkeypatch.setattr("benchmarks.fuzzing.subprocess.run", fuzz)
    file = tmp_path / "rates.json"
    monkeypatch.setattr(sys, "argv", ["fuzzing", "--rounds", "1", "--json", str(file)])
    assert main() == 1
    assert json.loads(file.read_text())["rates"][1]["rounds"] == [4.0]
    told = " ".join(capsys.readouterr().out.split())
    assert "got exit code 1 from '-m ddpopt fuzz" in told
    assert "a mode is wrong" in told


@pytest.mark.parametrize(("rate", "code"), [(2.9, 1), (3.1, 0)])
def test_too_few_models_a_second_end_with_1_and_the_rates_are_stored(
    rate: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fuzzing, "_graphs", lambda arguments: (200.0,) * arguments.rounds)
    monkeypatch.setattr(fuzzing, "_models", lambda arguments: ((rate,) * arguments.rounds, []))
    file = tmp_path / "rates.json"
    monkeypatch.setattr(sys, "argv", ["fuzzing", "--rounds", "2", "--json", str(file)])
    assert main() == code
    assert [found["rounds"] for found in json.loads(file.read_text())["rates"]] == [[200.0] * 2, [rate] * 2]
