"""``ddpopt gate``: what it takes, what it refuses, what it writes, and its exit codes."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpopt.gate.baseline import Baseline, Figures, Measuring, read, release_of, write
from tests.support.commands import run, run_where_no_file_can_be_written
from tests.support.gate_figures import CASE, FIGURES, with_mode

HERE = release_of(torch.__version__)
SETTINGS = Measuring(("gpt", "tied"), modes=("ddpopt-inline",))
Asked = list[tuple[Measuring, tuple[str, ...]]]
Measures = Callable[[Figures], Asked]
module: Any = importlib.import_module("ddpopt.gate.gate")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A baseline of two cases."""
    file = tmp_path / "baseline.json"
    write(Baseline(SETTINGS).with_figures(HERE, FIGURES), file)
    return file


def kept(file: Path) -> Baseline:
    baseline = read(file)
    assert baseline is not None
    return baseline


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Measures:
    """Has a run measure some figures; returns what it is asked for."""

    def measures(figures: Figures) -> Asked:
        asked: Asked = []

        def measure(settings: Measuring, due: tuple[str, ...], _: object) -> Any:
            asked.append((settings, due))
            return {name: figures[name] for name in due if name in figures}, {
                "gpt": ["Graph break at a.py:7"]
            }

        monkeypatch.setattr(module, "_measure", measure)
        return asked

    return measures


def test_the_same_figures_pass(file: Path, measuring: Measures) -> None:
    asked = measuring(FIGURES)
    result = run("gate", "--baseline", str(file))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("UNCHANGED; 2 cases against")
    assert asked == [(SETTINGS, ("gpt", "tied"))]


def test_a_change_fails_in_every_report(file: Path, measuring: Measures) -> None:
    before = file.read_text()
    reports = [file.parent / name for name in ("gate.xml", "gate.html", "gate.md")]
    words = [word for report in reports for word in ("--report", str(report))]
    measuring(with_mode(graphs=2))
    result = run("gate", "--baseline", str(file), "--json", "-", *words)
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["passes"], len(data["changes"]), data["figures"]) == (False, 1, with_mode(graphs=2))
    assert data["outcome"] == "CHANGED"
    assert "graphs: 1 before, 2 now" in reports[0].read_text()
    for report in reports[1:]:
        page = report.read_text()
        assert "CHANGED: 1 change; 2 cases against" in page
        assert "WRONG" not in page
        assert "Graph break at a.py:7" in page
        assert f"ddpopt gate --baseline {file} --update" in page
    assert "<td>gpt</td><td>ddpopt-inline</td><td>graphs</td><td>1</td><td>2</td>" in reports[2].read_text()
    assert "gpt, ddpopt-inline\n  graphs: 1 before, 2 now" in run("gate", "--baseline", str(file)).stdout
    assert file.read_text() == before


def test_update_writes_what_changed_and_says_so(file: Path, measuring: Measures) -> None:
    changed = with_mode(graphs=2)
    measuring(changed)
    result = run("gate", "--baseline", str(file), "--update")
    assert (result.exit_code, result.stderr) == (0, f"ddpopt: wrote {file}\n")
    assert "graphs: 1 before, 2 now" in result.stdout
    assert "If this is intended" not in result.stdout
    assert kept(file).figures(HERE, file) == changed
    assert run("gate", "--baseline", str(file), "--update").stderr == f"ddpopt: nothing to change in {file}\n"


def test_no_baseline_is_made_of_a_wrong_run_or_nothing(file: Path, measuring: Measures) -> None:
    before = file.read_text()
    measuring(with_mode(verdict="wrong: L0: a gradient"))
    result = run("gate", "--baseline", str(file), "--update")
    assert result.exit_code == 1
    assert "verdict: ok before, wrong: L0: a gradient now" in result.stdout
    assert f"{file} was not written:\n  gpt, ddpopt-inline: verdict: wrong: L0: a gradient" in result.stderr
    assert file.read_text() == before
    measuring({})
    new = file.with_name("new.json")
    assert run("gate", "gpt", "--baseline", str(new), "--update").exit_code == 3
    assert not new.exists()


def test_a_new_baseline_keeps_what_was_asked_for(tmp_path: Path, measuring: Measures) -> None:
    file = tmp_path / "ci" / "gate" / "b.json"
    asked = measuring(FIGURES)
    words = "gpt tied --update --mode ddpopt-split --backend eager --nproc 3 --steps 4 --baseline"
    result = run_where_no_file_can_be_written("gate", *words.split(), str(file))
    assert (result.exit_code, "2 cases against" in result.stdout) == (2, True)
    assert f"--baseline: cannot write {str(file)!r}: File too large; name another" in result.stderr
    file.unlink()
    page = tmp_path / "gate.html"
    result = run("gate", *words.split(), str(file), "--report", str(page))
    assert result.exit_code == 0
    assert result.stdout.startswith("NEW; 2 cases against")
    assert "What changed" not in page.read_text()
    settings = Measuring(("gpt", "tied"), ("ddpopt-split",), "eager", nproc=3, steps=4)
    assert kept(file).settings == asked[0][0] == settings


@pytest.mark.parametrize(
    ("words", "due", "targets"),
    [
        ("tied", ("tied",), ("gpt", "tied")),
        ("linear8 --update", ("linear8",), ("gpt", "tied", "linear8")),
        ("tied --update --nproc 3", ("gpt", "tied"), ("gpt", "tied")),  # other settings: every target
    ],
)
def test_targets_alone_are_measured_and_update_adds_them_and_leaves_the_rest(
    words: str, due: tuple[str, ...], targets: tuple[str, ...], file: Path, measuring: Measures
) -> None:
    asked = measuring({**FIGURES, "linear8": CASE})
    result = run("gate", "--baseline", str(file), *words.split())
    assert (result.exit_code, asked[0][1]) == (0, due)
    assert ("Not compared: gpt" in result.stdout) is ("gpt" not in due)
    assert kept(file).settings.targets == targets
    assert kept(file).figures(HERE, file) == dict.fromkeys(targets, CASE)
