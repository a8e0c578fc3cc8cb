"""Looking where a trial goes wrong, from the process that started the ranks; it starts ranks of its own."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import distributed as dist

from ddpopt.judge.locating import locate as located
from ddpopt.judge.locating.locate import locate
from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom, Try
from ddpopt.judge.trials import relaunching
from ddpopt.judge.trials.runner import to_locate
from ddpopt.judge.verdict import Finding, Rung, Status, Trial, Verdict
from ddpopt.ranks.failures import RankFailure

MODULE = "tests.support.miscompiled"


def wrong(mode: str, backend: str) -> Trial:
    finding = Finding("L2", "as accurate as eager, up to rounding", "off", rank=0, step=0)
    return Trial("case", mode, "default", backend, Status.WRONG, findings=(finding,))


def broken(backend: str) -> Trial:
    return Trial("case", "whole", "default", backend, Status.BROKEN, "rank 0 died of SIGSEGV")


WITH_RANK_1 = "together with the backend wrong_on_rank_1, with 2 ranks"
DYING = "the backend dying_on_tanh"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trial", "nproc", "rung", "layer"),
    [
        (wrong("whole", "wrong_on_rank_1"), 2, ("wrong_on_rank_1, whole on 2 ranks", ""), WITH_RANK_1),
        (broken("dying_on_tanh"), 1, ("dying_on_tanh, no DDP", "rank 0 died of SIGSEGV"), DYING),
    ],
)
def test_a_backend_that_is_wrong_or_takes_its_ranks_down_is_located_and_shown(
    trial: Trial,
    nproc: int,
    rung: tuple[str, str],
    layer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def top_rung_alone(question: Question, ranks: int) -> Iterator[Stage]:
        yield Stage("local" if ranks == 1 else question.mode, question.backend, ranks)

    monkeypatch.setattr(located, "stages_of", top_rung_alone)  # each stage costs seconds
    found = locate(f"{MODULE}:short", trial, tmp_path / "shown.py", nproc=nproc, limit_s=400)
    (shown,) = (each for each in found.rungs if each.agrees is False)
    assert (shown.name, shown.detail if nproc == 1 else "") == rung
    assert found.layer.endswith(layer)
    assert [segment.partition(" (")[0] for segment in found.segments] == ["graph 0, segment 1 of 2: tanh"]
    assert (found.script, found.reproduces, found.note) == ("shown.py", True, "")
    assert f"nproc={nproc}," in (tmp_path / "shown.py").read_text()
    assert not dist.is_initialized()


STAGE = Stage("local", "mine")
RUNG = Rung("mine, no DDP", agrees=False)
RAISED = RankFailure(0, "raised", "a task", 1, stack="Traceback\n  in f\na.KeyError: 'x'\n\nSee the docs.")
STALLED = RankFailure(0, "stalled", "a task", -9, "SIGKILL")


@pytest.mark.parametrize(
    ("trying", "failure", "note"),
    [
        (None, RAISED, "the search ended early: rank 0 raised: a.KeyError: 'x' See the docs."),
        (Try(STAGE), STALLED, "the search ended early while mine, no DDP was being tried: rank 0 stalled"),
    ],
)
def test_ranks_that_fail_between_two_tries_or_stall_end_the_search_with_a_note(
    trying: Try | None, failure: RankFailure, note: str
) -> None:
    known = Known(trying=trying)
    assert not known.survive(failure)
    assert known.notes == [note]
    known.trying = Try(STAGE)
    assert known.survive(RAISED)
    assert known.symptom == Symptom("run", "KeyError")


def test_a_script_that_cannot_be_written_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found_wrong(known: Known, *_: object) -> None:
        known.hear(Known([RUNG], Stage("local", "eager"), Symptom("numbers")))

    script = tmp_path / "shown.py"
    script.mkdir()
    monkeypatch.setattr(located, "_in_ranks", found_wrong)
    found = locate(f"{MODULE}:short", wrong("whole", "eager"), script, nproc=1)
    assert (found.layer, found.script) == ("Dynamo (torch.compile, backend eager)", "")
    assert found.note == f"no script could be written or run: {script}: Is a directory"


def test_ranks_that_cannot_be_started_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(relaunching, "launch", full)
    found = locate(f"{MODULE}:short", wrong("whole", "eager"), tmp_path / "shown.py", nproc=1)
    assert found.layer == "none was found before the search ended"
    assert found.note.startswith("the search on 1 rank(s) ended early: [Errno 28] No space left on device; ")


def test_what_is_located_is_the_first_that_is_wrong_or_else_the_first_that_took_its_ranks_down() -> None:
    fine = Trial("case", "whole", "default", "eager", Status.OK)
    untried = replace(broken("mine"), reason="not tried again: on case rank 0 died")
    assert to_locate(Verdict("case", 2, (fine, broken("a"), wrong("torch", "b")))) == wrong("torch", "b")
    assert to_locate(Verdict("case", 2, (fine, untried, broken("a")))) == broken("a")
    assert to_locate(Verdict("case", 2, (fine, untried))) is None
