"""Campaigns: the same seed gives the same run, an interruption loses nothing, and a failure is kept once.

They are told how models end by a stand-in for the workers, which `test_workers.py` is about.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path

import pytest

from ddpopt.fuzz import campaign
from ddpopt.fuzz.campaign import Budget, Campaign
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.journal import LINES, CampaignPlan, Entry, Journal, summarized
from ddpopt.fuzz.journal import PLAN as FILE_OF_PLAN
from ddpopt.fuzz.questions import Answer, Outcome, Task
from ddpopt.fuzz.signatures import FailureSignature
from ddpopt.fuzz.stream import Source, drawn_block
from tests.support import commands

MODES = ("torch", "ddpopt-split")
PLAN = CampaignPlan(3, 0, MODES, "aot_eager", 1, ("cond",), "2.13.0", "5f")


class Answering(nullcontext[float]):
    """In a worker's place: how a model ends follows from its text."""

    def ask(self, task: Task) -> Iterator[Answer]:
        digest = hashlib.sha256(task.source.encode()).digest()
        for mode in task.modes:
            error = FailureSignature("error", f"Error{digest[0] // 4 % 3}")
            fails = digest[0] % 4 == 0
            yield Answer(mode, Outcome.WRONG, error, "said") if fails else Answer(mode, Outcome.OK)


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "Worker", Answering)


Tell = Callable[[tuple[FoundCase, ...]], None]


def run(folder: Path, examples: int, tell: Tell = lambda _: None) -> list[Entry]:
    journal = Journal(folder, PLAN)
    Campaign(journal, PLAN, Budget(examples=examples), tell).run()
    return sorted(journal.entries, key=lambda entry: entry.place)


def essence(entries: list[Entry]) -> list[tuple[object, ...]]:
    """What a run decides, without when it did."""
    return [(e.place, e.features, [(a.mode, a.kind, a.signature) for a in e.answers]) for e in entries]


def files(folder: Path) -> list[str]:
    """Names of the cases and scripts of a campaign."""
    return sorted(file.name for file in (folder / "cases").iterdir())


def test_a_sequence_does_not_dwell_on_variants_of_one_model() -> None:
    features = [model.features for _, (_, model) in zip(range(200), Source(0).models(), strict=False)]
    assert len({frozenset(each) for each in features}) > 190
    assert sum(one == other for one, other in pairwise(features)) < 3


def test_a_run_that_was_interrupted_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 24)
    assert [entry.place for entry in whole] == list(range(24))
    judged = 0

    def interrupt(_: tuple[FoundCase, ...]) -> None:
        nonlocal judged
        judged += 1
        if judged == 7:
            raise KeyboardInterrupt

    part = run(tmp_path / "part", 24, tell=interrupt)
    assert len(part) == 7
    file = tmp_path / "part" / LINES
    file.write_text(file.read_text() + '{"seconds": 0, "pla')  # the process ended while it wrote
    rest = run(tmp_path / "part", 24)
    assert essence(rest) == essence(whole)
    assert files(tmp_path / "part") == files(tmp_path / "whole") != []


def test_a_failure_is_kept_once_and_counted_each_time(tmp_path: Path) -> None:
    kept: list[str] = []
    entries = run(tmp_path, 40, tell=lambda new: kept.extend(case.key for case in new))
    failures = [a for entry in entries for a in entry.answers if a.kind is Outcome.WRONG]
    assert len(kept) == len(set(kept)) < len(failures)
    cases = [FoundCase.read(file) for file in (tmp_path / "cases").glob("*.json")]
    assert {case.key for case in cases} == set(kept)
    counted = summarized(PLAN, entries).failures
    assert sum(one.times for one in counted) == len(failures)
    assert all(file.with_suffix(".py").exists() for file in (tmp_path / "cases").glob("*.json"))


def test_a_campaign_ends_when_its_time_is_up(tmp_path: Path) -> None:
    assert Campaign(Journal(tmp_path, PLAN), PLAN, Budget(seconds=0)).run().models == 0


# --------------------------------------------------------------------------------- several at one campaign

FUZZ = [  # three models, into the folder that follows
    *("fuzz", "--mode", "ddpopt-inline", "--backend", "eager"),
    *("--seed", "5", "--examples", "3", "--out"),
]
NUMBERED = {"RANK": "1", "WORLD_SIZE": "2"}
"""What tells the second of torchrun's two processes its number."""


def test_each_process_judges_models_of_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NUMBERED.items():
        monkeypatch.setenv(name, value)
    commands.run(*FUZZ, str(tmp_path), "--without", "cond, dropout")
    (folder,) = tmp_path.iterdir()
    plan = json.loads((folder / FILE_OF_PLAN).read_text())
    assert (folder.name, plan["shard"], plan["modes"]) == ("shard-1", 1, ["ddpopt-inline"])
    entries = [Entry.from_line(line) for line in (folder / LINES).read_text().splitlines()]
    drawn = [model for _, model in islice(Source(5, 1, ("cond", "dropout")).models(), 3)]
    assert [entry.features for entry in entries] == [tuple(sorted(model.features)) for model in drawn]


def test_loaded_modules_do_not_change_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(7)
    before = [drawn_block(source, number) for number in range(5)]
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "numbers_of_mine.py").write_text(f"NUMBERS = {[*range(100, 200)]}")
    importlib.import_module("numbers_of_mine")  # Hypothesis draws constants of the user's own modules, too
    assert [drawn_block(source, number) for number in range(5)] == before
