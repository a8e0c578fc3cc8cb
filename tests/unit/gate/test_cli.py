"""``ddpopt gate``: what it takes, what it refuses, what it writes, and its exit codes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ddpopt.gate.measuring
from ddpopt.cli import app as cli
from ddpopt.errors import InfrastructureError
from ddpopt.gate.baseline import Baseline, read, release_of, write
from ddpopt.gate.figures import Figures
from ddpopt.gate.measuring import Measured, Problem, Settings
from tests.unit.gate_figures import CASE, FIGURES, MODE, with_mode

HERE = release_of(torch.__version__)
SETTINGS = Settings(("gpt", "tied"), modes=("ddpopt-inline",), timed=("gpt",), collected=("tests",))


def run(*args: str) -> Any:  # the type of the runner's results moves with typer's versions
    return CliRunner().invoke(cli.app, ["gate", *args], prog_name="ddpopt")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A baseline of two cases."""
    file = tmp_path / "baseline.json"
    write(Baseline(SETTINGS).with_figures(HERE, FIGURES), file)
    return file


def measuring(
    monkeypatch: pytest.MonkeyPatch, figures: Figures, *problems: Problem
) -> list[tuple[Settings, Figures]]:
    """Have a run measure these figures; notes what it is asked for."""
    asked: list[tuple[Settings, Figures]] = []

    def measure(settings: Settings, before: Figures, *_: object) -> Measured:
        asked.append((settings, before))
        return Measured(figures, problems)

    monkeypatch.setattr(ddpopt.gate.measuring, "measure", measure)
    return asked


def test_the_same_figures_pass(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = measuring(monkeypatch, FIGURES)
    result = run("--baseline", str(file))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "UNCHANGED: nothing moved; 2 cases" in result.stdout
    assert asked == [(SETTINGS, FIGURES)]


def test_annotations_do_not_stand_in_the_json_on_stdout(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    measuring(monkeypatch, with_mode(replace(MODE, graphs=2)))
    result = run("--baseline", str(file), "--json", "-", "--github")
    assert json.loads(result.stdout)
    assert "::error title=" in result.stderr


def test_what_moved_fails_and_leaves_the_baseline_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_text()
    measuring(monkeypatch, with_mode(replace(MODE, graphs=2)))
    result = run("--baseline", str(file))
    assert result.exit_code == 1
    assert "gpt, ddpopt-inline\n  graphs: 1 before, 2 now" in result.stdout
    assert "If that is meant" in result.stdout
    assert file.read_text() == before


def test_update_writes_what_moved_and_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = with_mode(replace(MODE, graphs=2))
    measuring(monkeypatch, moved)
    result = run("--baseline", str(file), "--update")
    assert result.exit_code == 0
    assert "graphs: 1 before, 2 now" in result.stdout
    assert "If that is meant" not in result.stdout
    assert result.stderr == f"ddpopt: wrote {file}\n"
    kept = read(file)
    assert kept is not None
    assert kept.figures(HERE, file) == moved


def test_update_on_the_same_figures_gives_the_same_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_text()
    near = with_mode(replace(MODE, potential=1.004, margins={"L0": 0.0, "L1": 0.31}))
    measuring(monkeypatch, near)
    result = run("--baseline", str(file), "--update")
    assert (result.exit_code, result.stderr) == (0, f"ddpopt: nothing to change in {file}\n")
    assert file.read_text() == before


def test_no_baseline_is_made_of_a_run_that_is_wrong(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_text()
    measuring(monkeypatch, FIGURES, Problem("gpt", "ddpopt-inline", "wrong: L0: a gradient"))
    result = run("--baseline", str(file), "--update")
    assert result.exit_code == 1
    assert "check: passes before, wrong: L0: a gradient now" in result.stdout
    assert result.stderr == f"ddpopt: {file} was not written, for not every check passed\n"
    assert file.read_text() == before


def test_no_baseline_is_made_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, Figures())
    assert run("gpt", "--baseline", str(tmp_path / "b.json"), "--update").exit_code == 1
    assert not (tmp_path / "b.json").exists()


def test_a_new_baseline_keeps_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "b.json"
    asked = measuring(monkeypatch, FIGURES)
    options = [
        "--mode",
        "ddpopt-split",
        "--backend",
        "eager",
        "--nproc",
        "3",
        "--tests",
        "a,b",
        "--steps",
        "4",
    ]
    result = run("gpt", "tied", "--baseline", str(file), "--update", *options)
    assert result.exit_code == 0
    kept = read(file)
    assert kept is not None
    assert kept.settings == asked[0][0] == Settings(
        targets=("gpt", "tied"),
        modes=("ddpopt-split",),
        backend="eager",
        nproc=3,
        steps=4,
        timed=("gpt", "tied"),
        collected=("a", "b"),
    )  # fmt: skip


def test_only_looks_at_what_it_names_and_says_what_it_left_out(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measuring(monkeypatch, Figures({"tied": CASE}))
    result = run("--baseline", str(file), "--only", "tied")
    assert result.exit_code == 0
    assert "Not compared, for --only left it out: gpt, tests" in result.stdout
    settings, before = asked[0]
    assert (settings.targets, settings.timed, settings.collected) == (("tied",), (), ())
    assert before == Figures({"tied": CASE})


def test_only_with_update_leaves_the_rest_of_the_baseline(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(CASE, modes={"ddpopt-inline": replace(MODE, graphs=5)})
    measuring(monkeypatch, Figures({"tied": other}))
    assert run("--baseline", str(file), "--only", "tied", "--update").exit_code == 0
    kept = read(file)
    assert kept is not None
    assert kept.settings == SETTINGS
    assert kept.figures(HERE, file) == replace(FIGURES, cases={**FIGURES.cases, "tied": other})


def test_fewer_targets_than_the_baseline_has_fail(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, replace(FIGURES, cases={"gpt": CASE}))
    result = run("gpt", "--baseline", str(file))
    assert result.exit_code == 1
    assert "tied\n  case: there before, missing now" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "3"], "--nproc: the baseline was measured with 2, got 3"),
        (["--mode", "torch"], "--mode: the baseline was measured with ('ddpopt-inline',), got ('torch',)"),
        (["--only", "resnet"], "--only: expected some of the baseline's targets, got 'resnet'"),
        (["--only", ""], "--only: expected some of the baseline's targets, got ''"),
        (["--timed", "resnet"], "--timed: expected some of the targets, got 'resnet'"),
        (["nobody"], "expected the name of a case in the corpus, got 'nobody'"),
        (["--update", "--mode", "fsdp1"], "--mode: expected modes that have DDP's reducer, got 'fsdp1'"),
        (["--update", "--mode", "none"], "none"),
        (["--update", "--backend", "none"], "expected the name of a Dynamo backend, got 'none'"),
        (["--update", "--nproc", "0"], "nproc: expected a positive number, got 0"),
        (["--json", "no/such/folder/x"], "--json: cannot write 'no/such/folder/x'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_rank_is_started(
    arguments: list[str], said: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = measuring(monkeypatch, FIGURES)
    result = run("--baseline", str(file), *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert asked == []


def test_a_baseline_that_is_not_there_is_no_reason_to_pass(tmp_path: Path) -> None:
    result = run("--baseline", str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "to compare with; write it with --update" in result.stderr


def test_a_baseline_of_another_release_of_torch_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    write(Baseline(SETTINGS).with_figures("torch 1.0", FIGURES), file)
    result = run("--baseline", str(file))
    assert result.exit_code == 2
    assert f"expected figures of {HERE}, which runs here, found torch 1.0" in result.stderr


def test_ranks_that_cannot_be_had_are_no_verdict(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InfrastructureError("rank 1 died")

    monkeypatch.setattr(ddpopt.gate.measuring, "measure", fail)
    result = run("--baseline", str(file))
    assert (result.exit_code, result.stderr) == (3, "ddpopt: error: rank 1 died\n")


def test_every_report_that_was_asked_for_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary, document = file.parent / "summary.md", file.parent / "gate.json"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    measuring(monkeypatch, with_mode(replace(MODE, recompiles=1)))
    result = run("--baseline", str(file), "--github", "--json", str(document))
    assert result.exit_code == 1
    assert "::error title=ddpopt gate%3A gpt%2C ddpopt-inline::recompiles: 0 before, 1 now" in result.stdout
    assert "| gpt, ddpopt-inline | recompiles | 0 | 1 |" in summary.read_text()
    assert json.loads(document.read_text())["passes"] is False


def test_the_corpus_stands_for_each_of_its_cases() -> None:
    assert {"gpt", "tied"} < set(Settings(("corpus", "gpt")).named)
    assert len(Settings(("corpus", "gpt")).named) == len(Settings(("corpus",)).named)


def test_the_repositorys_own_baseline_measures_cases_that_exist() -> None:
    own = read(Path(__file__).parents[3] / "ci" / "baseline.json")
    assert own is not None
    assert set(own.settings.named) <= set(Settings(("corpus",)).named)
    assert own.settings.collected == ("tests/unit", "tests/integration", "tests/property", "tests/multigpu")
    assert own.to_text() == (Path(__file__).parents[3] / "ci" / "baseline.json").read_text()
