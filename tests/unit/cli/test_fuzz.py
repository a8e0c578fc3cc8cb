"""ddpopt fuzz and ddpopt minimize: what they refuse before a worker starts, and how they show progress."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddpopt.cli import app as cli
from ddpopt.cli.fuzzing import planned
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.minimize import Minimized
from ddpopt.fuzz.questions import Setting
from ddpopt.fuzz.signatures import Signature
from ddpopt.fuzz.text import searching_line
from ddpopt.judge.report.progress import StatusLine
from ddpopt.ranks.pool import Pool
from ddpopt.testing.drawn import DrawnModel, step

CASE = FoundCase(
    DrawnModel(steps=(step("residual", body=(step("linear"),)),)),
    "torch",
    Setting(),
    Signature("error", "KeyError", "graph.py in find"),
)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def start(_: Pool) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(Pool, "_start", start)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)  # one process, whoever runs this test
    (tmp_path / "case.json").write_text(CASE.to_json())
    (tmp_path / "other.json").write_text("[]")
    (tmp_path / "a file").write_text("")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "campaign.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("fuzz --minutes nan", "--minutes: expected a positive number, got nan"),
        ("fuzz --timeout inf", "--timeout: expected a positive number, got inf"),
        ("fuzz --examples -1", "--examples: expected a positive number, got -1"),
        ("fuzz --nproc 0", "--nproc: expected a positive number, got 0"),
        ("fuzz --workers 0", "--workers: expected a positive number, got 0"),
        ("fuzz --mode eager", "--mode: expected one of torch, whole,"),
        ("fuzz --backend fast", "backend: expected the name of a Dynamo backend, got 'fast'"),
        ("fuzz --without loops", "--without: expected one of "),
        ("fuzz --without droput", "got 'droput'; did you mean 'dropout'?"),
        ("fuzz --blocks no.such", "--blocks: importing 'no.such' failed: ModuleNotFoundError: No module"),
        ("fuzz --out case.json/x", "--out: cannot write to 'case.json/x': Not a directory"),
        ("fuzz --database http://x", "--database: expected a folder or redis://host:port/number, got 'http:"),
        ("fuzz --database case.json", "--database: expected a folder or redis://host:port/number, got 'case"),
        (
            "fuzz --database redis://127.0.0.1:1/0",
            "--database: 'redis://127.0.0.1:1/0' does not answer: Error",
        ),
        (
            "fuzz --database redis://h:port/0",
            "--database: 'redis://h:port/0' is no address of a server: Port",
        ),
        ("fuzz --out cut", "campaign.json' does not say which campaign it is of (Expecting"),
        ("minimize none.json", "cannot read the case 'none.json': No such file"),
        ("minimize other.json", "other.json: expected a case that 'ddpopt fuzz' wrote"),
        ("minimize case.json --tries 0", "--tries: expected a positive number, got 0"),
        ("minimize case.json --tries 3 --minutes nan", "--minutes: expected a positive number, got nan"),
        (
            "minimize case.json --out case.py",
            "--out: 'case.py' would put the small case in place of 'case.js",
        ),
        ("minimize case.json --out small.txt", "--out: expected the name of a Python file in a folder that"),
        ("minimize case.json --out no/small.py", "that exists, got 'no/small.py'"),
    ],
)
def test_what_cannot_be_run_ends_with_2_and_says_why_before_a_worker_starts(
    arguments: str, words: str, unstarted: Path
) -> None:
    result = CliRunner().invoke(cli.app, arguments.split(), prog_name="ddpopt")
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


def test_a_number_of_this_process_among_several_is_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    plan = planned(5, "whole,ddpopt-split", "aot_eager", 1, 2, "cond, dropout", ())
    assert (plan.seed, plan.shard, plan.workers) == (5, 3, 2)
    assert plan.modes == ("whole", "ddpopt-split")
    assert plan.without == ("cond", "dropout")


# -------------------------------------------------------------------------------------------- how it goes


def test_a_search_says_how_many_models_were_tried_and_what_is_left() -> None:
    assert searching_line(Minimized(CASE, CASE, 7)) == (
        "7 models tried, down to 2 steps at width 8, 1 rank, aot_eager"
    )
    assert searching_line(Minimized(CASE, CASE, 1, drifted={"wrong": 2})).endswith(
        "1 rank, aot_eager, 2 failed in another way"
    )


def test_without_a_terminal_a_line_is_written_now_and_then_and_made_only_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("ddpopt.judge.report.progress.time.monotonic", lambda: now)
    made: list[float] = []

    def line() -> str:
        made.append(now)
        return f"at {now:g} [not markup] {'x' * 100}"

    with StatusLine("at first") as shown:
        for second in range(25):
            now = float(second)
            shown.show(line)
        shown.say("found")
    assert made == [10, 20]
    output = capsys.readouterr()
    assert output.out == ""
    tail = " [not markup] " + "x" * 100
    assert output.err.splitlines() == [f"at 10{tail}", f"at 20{tail}", "found"]
