"""Tests of `benchmarks.step` itself: arguments, what is judged and what is kept."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step
from benchmarks.network import Network, loopback
from benchmarks.step import main
from benchmarks.step_rank import Figures, Job
from tests.unit.step_figures import figures

JOB = Job("linears", (), "", 1, "cpu")
SLOW = Network("a slow link", ("a", "b"), ((), ()), emulated=True)


def measure_nothing(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Job], Figures], network: Network = SLOW
) -> list[tuple[str, Job]]:
    """Have no rank started; returns the rate and the job of each measurement as it is made."""
    rates: list[str] = []
    made: list[tuple[str, Job]] = []

    @contextmanager
    def hosts(rate: str) -> Iterator[Network]:
        rates.append(rate)
        yield network

    def measure(job: Job, *_: Any) -> Figures:
        made.append((rates[-1], job))
        return answer(job)

    monkeypatch.setattr(step, "two_hosts", hosts)
    monkeypatch.setattr(step, "measure", measure)
    return made


def far_from_it(_: Job) -> Figures:
    return figures(eager=[14.0, 14.0], inline=[15.0, 15.0])


def test_what_falls_short_is_told_with_its_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_nothing(monkeypatch, far_from_it)
    assert main(["--rate", "10gbit", "--models", "linears"]) == 1
    out = capsys.readouterr().out
    assert re.search("linears at 10gbit.*inline to the limit.*1.154.*at most 1.05.*no", out)


def test_over_loopback_nothing_is_judged_one_rate_is_enough_and_all_figures_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = measure_nothing(monkeypatch, far_from_it, loopback("it takes root"))
    kept = tmp_path / "step.json"
    assert main(["--rate", "1gbit,10gbit", "--models", "linears", "--json", str(kept)]) == 0
    assert len(made) == 1
    assert "not judged: there is no slow network" in capsys.readouterr().out
    document = json.loads(kept.read_text())
    assert document["figures"] == [{"rate": "no rate", **asdict(far_from_it(JOB))}]
    assert {claim["remark"] for claim in document["claims"]} == {"not measured"}
