"""What a command cannot use: it ends with 2 and says what to give instead, before a rank is started."""

import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpopt.cli import fuzzing
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.questions import Setting
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.gate.baseline import Baseline, Measuring, release_of, write
from ddpopt.ranks.pool import Pool
from ddpopt.testing.drawn import DrawnModel, step
from ddpopt.tuning.records import Link
from tests.support.commands import run
from tests.support.gate_figures import FIGURES

FAILURE = FailureSignature("error", "KeyError", "graph.py in find")
CASE = FoundCase(DrawnModel((step("linear"),)), "torch", Setting(), FAILURE)
LINK = Link(1e-4, 1e-9, 0.0, 1.0, 0.0, "gloo", 1, {})
BASELINE = Baseline(Measuring(("gpt", "tied"), modes=("ddpopt-inline",)))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of all kinds in the current folder, and no rank that could be started."""

    def start(_: Pool) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(Pool, "_start", start)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)  # one process, whoever runs this test
    write(BASELINE.with_figures(release_of(torch.__version__), FIGURES), Path("b.json"))
    Path("case.json").write_text(CASE.to_json())
    Path("other.json").write_text("{}")
    Path("fast.json").write_text(replace(CASE, mode="fast").to_json())
    Path("link.json").write_text(LINK.to_json())
    Path("old.json").write_text(LINK.to_json().replace(f'_link": {Link.FORMAT}', '_link": 1'))
    Path("cut").mkdir()
    Path("cut/campaign.json").write_text("{")


def test_the_command_that_fuzz_prints_for_a_failure_runs(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("my campaign")
    folder.mkdir()
    (folder / f"{CASE.stem}.json").write_text(CASE.to_json())
    campaign: Any = SimpleNamespace(journal=SimpleNamespace(cases=folder))
    fuzzing._tell(campaign, print, 0, (CASE,))
    first, *words = shlex.split(capsys.readouterr().err.splitlines()[-1])
    assert (first, str(run(*words).exception)) == ("ddpopt", "a rank was started")  # so the case was read


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("explain tied --ddp caps=3;1", "--ddp: expected KEY=VALUE where VALUE is a number, true, false, or"),
        ("explain tied --ddp static_grap=true", "; did you mean 'static_graph'?"),
        ("explain tied --json no/x.json", "--json: cannot write 'no/x.json'; name a file in a writable"),
        ("doctor tied --steps 1", "steps: expected at least 2, because DDP rebuilds its buckets before"),
        ("verify tied --options defalt", "got 'defalt'; did you mean 'default'?"),
        ("verify tied --mesh 2x2", "'tied' does not; give its Case the attribute parallelize"),
        ("verify tp_mlp --mesh 2x", "--mesh: expected COPIESxPARTS, such as 2x2, got '2x'"),
        ("verify tied --backend inducktor", "did you mean 'inductor'?"),
        ("verify tied --report v.txt", "expected a file name that ends in .xml, .html, .md"),
        ("tune tied --mode ddpopt-inlin", "--mode: expected one of ddpopt-inline, ddpopt-split, eager, got"),
        ("tune tied --link case.json", "--link case.json: expected a link that ddpopt wrote, got something"),
        ("tune tied --html no/t.html", "--html: cannot write 'no/t.html'; name a file in a writable folder"),
        ("explain tied --link case.json", "--link: expected --profile FILE with it, which 'ddpopt tune"),
        ("tune tied --link cut", "--link: cannot read 'cut': [Errno 21] Is a directory: 'cut'; name a file"),
        ("tune tied --world-size 8,1", "numbers from 2 and a link of 2 or more ranks, got '8,1' and 2"),
        ("tune tied --world-size=", "expected numbers from 2 and a link of 2 or more ranks, got '' and 2"),
        ("tune tied --world-size 8 --link link.json", "a link of 2 or more ranks, got '8' and 1"),
        ("tune tied --world-size 8 --nproc 1", "numbers from 2 and a link of 2 or more ranks, got '8' and 1"),
        ("tune tied --link old.json", "format 1, which another version wrote; this one has 2. Make it again"),
        ("tune tied --backend nosuch", "expected the name of a Dynamo backend, got 'nosuch'; known"),
        ("tune tied --most-mb 0", "--most-mb: expected a positive number, got 0.0"),
        ("tune tied --trace x --html ./x", "--html: './x' is also the file of --trace; name another"),
        ("tune tied --trace=", "--trace: cannot write ''; name a file in a writable folder"),
        ("verify tied --json v.md --report v.md", "'v.md' is also the file of --json; name another"),
        ("minimize case.json --json a.py --out a.py", "'a.py' is also the file of --json; name another"),
        ("link --nproc 0", "--nproc: expected a positive number, got 0"),
        ("gate --baseline b.json --nproc 3", "--nproc: the baseline was measured with 2, got 3"),
        ("gate --baseline b.json --mode torch", "measured with ('ddpopt-inline',), got ('torch',)"),
        ("gate --baseline b.json resnet", "targets in the baseline, got 'resnet'; add them with --update"),
        ("gate --baseline b.json nobody --update", "expected the name of a case in the corpus, got 'nobody'"),
        ("gate --baseline b.json --update --mode fully_shard", "expected modes that use DDP's reducer"),
        ("gate --baseline ci/b.json", "'ddpopt gate TARGET ... --baseline ci/b.json --update' measures and"),
        ("gate --baseline ci/b.json --update", "at least one TARGET to measure, got none, and 'ci/b.json'"),
        ("gate --baseline /dev/full", "/dev/full: expected a baseline that this version of 'ddpopt gate"),
        ("fuzz --minutes nan", "--minutes: expected a positive number, got nan"),
        ("fuzz --mode eagle", "--mode: expected one of eager, torch, whole,"),
        ("fuzz --without loops", "--without: expected one of "),
        ("fuzz --out case.json/x", "--out: cannot write to 'case.json/x': Not a directory"),
        ("fuzz --out cut", "--out: 'cut' contains another campaign (seed: None there, 0 here;"),
        ("minimize none.json", "cannot read the case 'none.json': No such file"),
        ("minimize other.json", "other.json: expected a case that 'ddpopt fuzz' wrote"),
        ("minimize fast.json", "'ddpopt fuzz' wrote, got something else: UsageError: mode: expected one"),
        ("minimize case.json --out case.py", "--out: 'case.py' would overwrite"),
        ("minimize case.json --out a.txt", "--out: expected the name of a Python file in an existing folder"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_rank_is_started(words: str, said: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("ddpopt: error: ")
    assert said in " ".join(result.stderr.split())
