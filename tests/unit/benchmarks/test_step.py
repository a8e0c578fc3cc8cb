"""Tests of `benchmarks.step` itself: arguments, what is judged and what is kept."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step
from benchmarks.devices import description, device_of
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


def near_the_limit(_: Job) -> Figures:
    return figures(eager=[14.0, 14.0], inline=[13.1, 13.2])


def far_from_it(_: Job) -> Figures:
    return figures(eager=[14.0, 14.0], inline=[15.0, 15.0])


def test_each_rate_has_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = measure_nothing(monkeypatch, near_the_limit)
    assert main(["--rate", "1gbit,10gbit", "--models", "linears,tied", "--rounds", "3"]) == 0
    assert [(rate, job.model) for rate, job in made] == [
        ("1gbit", "linears"),
        ("1gbit", "tied"),
        ("10gbit", "linears"),
        ("10gbit", "tied"),
    ]
    assert {(job.rounds, job.device) for _, job in made} == {(3, "cpu")}


def test_what_falls_short_is_told_with_its_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure_nothing(monkeypatch, far_from_it)
    assert main(["--rate", "10gbit", "--models", "linears"]) == 1
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if "inline to the limit" in line and "1.1" in line
    )
    assert [cell.strip() for cell in line.strip("│").split("│")] == [
        *("step", "linears at 10gbit", "inline to the limit", "1.154", "1.154 – 1.154", "1.000"),
        *("at most 1.05", "no"),
    ]


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


def test_without_a_gpu_cuda_ends_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--device", "cuda"]) == 3
    assert "--device cuda: expected a GPU, but torch" in capsys.readouterr().out


@pytest.mark.parametrize(("gpus", "sender"), [(1, "gloo"), (2, "nccl")])
def test_nccl_sends_where_each_rank_has_a_gpu(
    gpus: int, sender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "A GPU")
    made = measure_nothing(monkeypatch, near_the_limit)
    with step.hosts("1gbit", "cuda") as network:
        assert network.emulated == (sender == "gloo")
    assert made == []
    assert description("cuda")["device"] == f"cuda, 2 ranks on {gpus} of: A GPU"
    assert description("cuda")["sent by"] == sender
    assert [device_of("cuda", rank).index for rank in range(2)] == [0, gpus - 1]
