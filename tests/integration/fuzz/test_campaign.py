"""Campaigns: the same seed gives the same run, an interruption loses nothing, and a failure is kept once."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from fakeredis import TcpFakeServer
from hypothesis.database import ExampleDatabase, InMemoryExampleDatabase

from ddpopt.fuzz import campaign
from ddpopt.fuzz.campaign import KEY, Campaign, Limits, open_database
from ddpopt.fuzz.cases import FoundCase
from ddpopt.fuzz.journal import LINES, Entry, Journal, Plan, summarized
from ddpopt.fuzz.questions import Answer, Kind, Setting, Task
from ddpopt.fuzz.signatures import Signature
from ddpopt.fuzz.stream import Source, drawn_block
from ddpopt.testing.drawn import DrawnModel

MODES = ("torch", "ddpopt-split")
PLAN = Plan(3, 0, 2, MODES, "aot_eager", 1, ("cond",), (), "2.13.0", "5f")


class Answering:
    """In a worker's place: how a model ends follows from its text, now sooner and now later."""

    asked: list[Task]

    def __init__(self, nproc: int, limit_s: float) -> None:
        self.asked = []

    def ask(self, task: Task) -> Iterator[Answer | None]:
        self.asked.append(task)
        digest = hashlib.sha256(task.source.encode()).digest()
        yield from [None] * (digest[1] % 3)
        for mode in task.modes:
            if digest[0] % 4 == 0:
                yield Answer(mode, Kind.WRONG, Signature("error", f"Error{digest[0] // 4 % 3}"), "said")
            else:
                yield Answer(mode, Kind.OK)

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "Worker", Answering)
    monkeypatch.setattr(campaign, "PAUSE_S", 0)


def run(
    folder: Path,
    examples: int,
    *,
    plan: Plan = PLAN,
    database: ExampleDatabase | None = None,
    tell: Callable[[tuple[FoundCase, ...]], None] = lambda _: None,
) -> list[Entry]:
    with Journal(folder, plan) as journal:
        Campaign(journal, plan, Limits(examples=examples), database, tell).run()
        return sorted(journal.entries, key=lambda entry: (entry.worker, entry.place))


def essence(entries: list[Entry]) -> list[tuple[object, ...]]:
    """What a run decides, without when it did."""
    return [
        (e.worker, e.place, e.features, [(a.mode, a.kind, a.signature) for a in e.answers]) for e in entries
    ]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", 30), run(tmp_path / "b", 30)
    assert essence(first) == essence(second)
    assert {entry.worker for entry in first} == {0, 1}
    names = [sorted(file.name for file in (tmp_path / each / "cases").iterdir()) for each in ("a", "b")]
    assert names[0] == names[1] != []


def test_blocks_depend_on_seed_shard_worker_and_number_alone() -> None:
    source = Source(1, 2, 3)
    assert drawn_block(source, 4) == drawn_block(Source(1, 2, 3), 4)
    others = [Source(2, 2, 3), Source(1, 1, 3), Source(1, 2, 2)]
    assert all(drawn_block(other, 4) != drawn_block(source, 4) for other in others)
    assert drawn_block(source, 5) != drawn_block(source, 4)


def test_a_sequence_does_not_dwell_on_variants_of_one_model() -> None:
    features = [model.features for _, (_, model) in zip(range(200), Source(0).models(), strict=False)]
    assert len({frozenset(each) for each in features}) > 190
    assert sum(one == other for one, other in pairwise(features)) < 3


def test_a_sequence_goes_on_at_any_place() -> None:
    source = Source(5)
    whole = [pair for pair, _ in zip(source.models(), range(70), strict=False)]
    rest = [pair for pair, _ in zip(source.models(30), range(40), strict=False)]
    assert rest == whole[30:]


def test_a_run_that_was_interrupted_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 24)
    judged = 0

    def interrupt(_: tuple[FoundCase, ...]) -> None:
        nonlocal judged
        judged += 1
        if judged == 7:
            raise KeyboardInterrupt

    part = run(tmp_path / "part", 24, tell=interrupt)
    assert len(part) == 7
    file = tmp_path / "part" / LINES
    file.write_text(file.read_text() + '{"worker": 0, "pla')  # the process ended while it wrote
    rest = run(tmp_path / "part", 24)
    assert essence(rest) == essence(whole)
    assert {entry.run for entry in rest} == {0, 1}
    assert sorted((tmp_path / "part" / "cases").iterdir())
    assert [f.name for f in sorted((tmp_path / "part" / "cases").iterdir())] == [
        f.name for f in sorted((tmp_path / "whole" / "cases").iterdir())
    ]


def test_a_failure_is_kept_once_and_counted_each_time(tmp_path: Path) -> None:
    kept: list[str] = []
    entries = run(tmp_path, 40, tell=lambda new: kept.extend(case.key for case in new))
    failures = [a for entry in entries for a in entry.answers if a.kind is Kind.WRONG]
    assert len(kept) == len(set(kept)) < len(failures)
    cases = [FoundCase.read(file) for file in (tmp_path / "cases").glob("*.json")]
    assert {case.key for case in cases} == set(kept)
    counted = summarized(PLAN, entries).failures
    assert sum(one.times for one in counted) == len(failures)
    assert all(file.with_suffix(".py").exists() for file in (tmp_path / "cases").glob("*.json"))


@pytest.fixture
def redis() -> Iterator[str]:
    """The address of a server that speaks Redis's protocol."""
    with TcpFakeServer(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["folder", "redis"])
def test_machines_that_share_a_database_judge_what_the_others_found(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue("redis") if kind == "redis" else str(tmp_path / "shared")
    run(tmp_path / "a", 30, database=open_database(address))
    found = {FoundCase.read(file).model for file in (tmp_path / "a" / "cases").glob("*.json")}
    elsewhere = Plan(**{**vars(PLAN), "seed": 99})
    entries = run(tmp_path / "b", 2, plan=elsewhere, database=open_database(address))
    assert len([entry for entry in entries if entry.worker == campaign.FROM_OTHERS]) >= len(found) > 0
    assert len([entry for entry in entries if entry.worker != campaign.FROM_OTHERS]) == 2
    places = [entry.place for entry in entries if entry.worker == campaign.FROM_OTHERS]
    assert places == list(range(len(places)))
    again = run(tmp_path / "b", 4, plan=elsewhere, database=open_database(address))
    assert len([entry for entry in again if entry.worker == campaign.FROM_OTHERS]) == len(places)


def test_what_another_machine_found_is_judged_as_it_was_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Task] = []
    ask = Answering.ask

    def noted(self: Answering, task: Task) -> Iterator[Answer | None]:
        asked.append(task)
        return ask(self, task)

    monkeypatch.setattr(Answering, "ask", noted)
    setting = Setting("aot_eager", 2, steps=5, lowers_limit=False)
    signature = Signature("error", "KeyError")
    case = FoundCase(DrawnModel(width=64, seed=17), MODES[0], setting, signature, origin="seed 5")
    database = InMemoryExampleDatabase()
    database.save(KEY, case.to_json().encode())
    entries = run(tmp_path, 2, database=database)
    (entry,) = [entry for entry in entries if entry.worker == campaign.FROM_OTHERS]
    assert entry.shared
    (task,) = [task for task in asked if task.source == case.task.source]
    assert task.setting == replace(setting, nproc=PLAN.nproc)
    kept = [FoundCase.read(file) for file in (tmp_path / "cases").glob("*.json")]
    assert {each.origin for each in kept if each.model == case.model} == {"seed 5"}


def test_examples_are_shared_out_among_workers(tmp_path: Path) -> None:
    entries = run(tmp_path, 7)
    assert [sum(entry.worker == worker for entry in entries) for worker in (0, 1)] == [4, 3]


def test_a_summary_counts_modes_features_and_failures(tmp_path: Path) -> None:
    entries = run(tmp_path, 20)
    data = json.loads(summarized(PLAN, entries).to_json())
    assert data["models"] == 20
    assert {mode: sum(kinds.values()) for mode, kinds in data["kinds"].items()} == dict.fromkeys(MODES, 20)
    assert data["features"] == Counter(feature for entry in entries for feature in entry.features)
    assert data["distinct"] == len(data["failures"])
