"""A campaign: workers judge models until time is up, and each new failure is kept at once.

Each worker has a sequence of models of its own (`ddpopt.fuzz.stream`), so that what one finds does not move
what another one draws. Invariant: equal plans give each worker the same models and the same answers, and the
journal has all that was judged when the campaign ends, however it ends.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, InMemoryExampleDatabase

from ddpopt.errors import UsageError
from ddpopt.fuzz.cases import FoundCase, task_of
from ddpopt.fuzz.journal import CampaignPlan, Entry, Journal, Summary, summarized
from ddpopt.fuzz.questions import TORCH, Answer, Outcome, Setting
from ddpopt.fuzz.scripting import save
from ddpopt.fuzz.stream import BLOCK, Source
from ddpopt.fuzz.workers import Worker
from ddpopt.testing.drawn import DrawnModel

KEY = b"ddpopt fuzz 1"
"""Of the cases in a database that machines share."""
_REDIS = ("redis://", "rediss://", "unix://")
FROM_OTHERS = -1
"""The worker of models that come from the database."""
PAUSE_S = 0.005
UNLOWERED = 25
"""One model of so many runs under torch's optimizer with torch's own smallest bucket."""


@dataclass(frozen=True)
class Budget:
    """How long a campaign runs.

    Attributes:
        seconds: of this run; None for no limit.
        examples: models of the whole campaign, earlier runs included; None for no limit.
        model_s: for one mode of one model, in seconds.
    """

    seconds: float | None = None
    examples: int | None = None
    model_s: float = 120.0


Tell = Callable[[tuple[FoundCase, ...]], None]
"""Called after each model with the failures that it added."""


@dataclass(frozen=True)
class _Turn:
    """A model that is to be judged.

    Attributes:
        number: whose sequence it is of.
        place: in that sequence.
        model: the model.
        setting: how it is run.
        origin: where it was drawn.
        shared: digest of the case, if another machine found it.
    """

    number: int
    place: int
    model: DrawnModel
    setting: Setting
    origin: str
    shared: str = ""


class Campaign:
    """A campaign in a folder.

    Args:
        journal: of the folder.
        plan: what is run.
        limits: for how long.
        database: shared with other machines.
        tell: called after each model.
    """

    def __init__(
        self,
        journal: Journal,
        plan: CampaignPlan,
        limits: Budget,
        database: ExampleDatabase | None = None,
        tell: Tell = lambda _: None,
    ) -> None:
        self.journal = journal
        self.plan = plan
        self.limits = limits
        self.database = database if database is not None else InMemoryExampleDatabase()
        self.tell = tell
        self.known = {FoundCase.read(file).key for file in sorted(journal.cases.glob("*.json"))}
        self.started = time.monotonic()
        self.others = {entry.shared for entry in journal.entries if entry.worker == FROM_OTHERS}
        self.places_of_others = itertools.count(journal.next_place(FROM_OTHERS))

    def run(self) -> Summary:
        """Run until a limit, or until Ctrl-C.

        Returns:
            What came of the whole campaign, earlier runs included.
        """
        workers = [Worker(self.plan.nproc, self.limits.model_s) for _ in range(self.plan.workers)]
        lanes = [self._lane(number, worker) for number, worker in enumerate(workers)]
        try:
            while lanes and (self.limits.seconds is None or self._elapsed() < self.limits.seconds):
                lanes = [lane for lane in lanes if not next(lane, "ended")]
                time.sleep(PAUSE_S)
        except KeyboardInterrupt:
            pass
        finally:
            for worker in workers:
                worker.close()
        return self.summary()

    def summary(self) -> Summary:
        """What came of it so far."""
        return summarized(self.plan, self.journal.entries)

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    # --------------------------------------------------------------------------------------------- one worker

    def _lane(self, number: int, worker: Worker) -> Iterator[None]:
        """What one worker does, in small pieces."""
        source = Source(self.plan.seed, self.plan.shard, number, self.plan.without)
        examples = self.limits.examples
        end = None if examples is None else len(range(number, examples, self.plan.workers))
        start = self.journal.next_place(number)
        if end is not None and start >= end:
            return
        yield from self._from_others(worker)
        for place, model in source.models(start):
            if end is not None and place >= end:
                return
            yield from self._judged(worker, self._turn(number, place, model))
            if (place + 1) % BLOCK == 0:
                yield from self._from_others(worker)

    def _turn(self, number: int, place: int, model: DrawnModel) -> _Turn:
        setting = Setting(self.plan.backend, self.plan.nproc)
        # one in so many runs with torch's own limit, which is torch's alone to get right
        if TORCH in self.plan.modes and place % UNLOWERED == UNLOWERED - 1:
            setting = replace(setting, lowers_limit=False)
        origin = f"seed {self.plan.seed}, shard {self.plan.shard}, worker {number}, place {place}"
        return _Turn(number, place, model, setting, f"{origin}, draws {self.plan.draws}")

    def _judged(self, worker: Worker, turn: _Turn) -> Iterator[None]:
        answers: list[Answer] = []
        for news in worker.ask(task_of(turn.model, self.plan.modes, turn.setting)):
            if news is None:
                yield None
            else:
                answers.append(news)
        features = tuple(sorted(turn.model.features))
        at_s = round(self._elapsed(), 2)
        # kept first: what the journal has is not judged again
        new = [self._kept(turn, answer) for answer in answers]
        self.journal.add(
            Entry(turn.number, turn.place, self.journal.run, at_s, features, tuple(answers), turn.shared)
        )
        self.tell(tuple(case for case in new if case is not None))

    def _kept(self, turn: _Turn, answer: Answer) -> FoundCase | None:
        """Keep a failure that is new; it is counted in any case."""
        if answer.kind not in (Outcome.WRONG, Outcome.BACKEND, Outcome.BROKEN) or answer.signature is None:
            return None
        case = FoundCase(
            *(turn.model, answer.mode, turn.setting),
            *(answer.signature, answer.kind, answer.detail),
            *(self.plan.torch, turn.origin),
        )
        if case.key in self.known:
            return None
        self.known.add(case.key)
        save(case, self.journal.cases)
        self.database.save(KEY, case.to_json().encode())
        return case

    def _from_others(self, worker: Worker) -> Iterator[None]:
        """Judge what other machines found, which may fail here too."""
        for data in sorted(self.database.fetch(KEY)):
            digest = hashlib.sha256(data).hexdigest()[:12]
            try:
                case = FoundCase.from_json(data.decode())
            except (UsageError, UnicodeDecodeError):
                continue  # of another version
            ours = case.mode in self.plan.modes and case.setting.backend == self.plan.backend
            if digest in self.others or case.key in self.known or not ours:
                continue
            self.others.add(digest)
            setting = replace(case.setting, nproc=self.plan.nproc)
            place = next(self.places_of_others)
            turn = _Turn(FROM_OTHERS, place, case.model, setting, case.origin, digest)
            yield from self._judged(worker, turn)


def open_database(address: str | None) -> ExampleDatabase:
    """Open what ``--database`` names, a folder or a Redis server; None keeps failures to this process.

    Raises:
        UsageError: it is neither, or does not answer.
    """
    if address is None:
        return InMemoryExampleDatabase()
    if not address.startswith(_REDIS):
        folder = Path(address)
        if not address or "://" in address or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"--database: expected a folder or redis://host:port/number, got {address!r}")
        return DirectoryBasedExampleDatabase(folder)
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis  # type: ignore[import-not-found, unused-ignore]  # who wants it installs it

        database = RedisExampleDatabase(Redis.from_url(address))
        next(iter(database.fetch(KEY)), None)
    except Exception as error:  # it is not installed, or of its client
        raise UsageError(
            f"--database: {address!r} does not answer: {error}; name a server that does, for which "
            "'pip install redis' brings the client, or a folder"
        ) from error
    return database
