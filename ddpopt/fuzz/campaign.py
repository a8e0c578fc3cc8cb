"""A campaign: models are judged until time is up, and each new failure is kept at once.

Invariant: equal plans give the same models and answers, and the journal holds everything that was judged,
however the campaign ends.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from ddpopt.fuzz.cases import FoundCase, task_of
from ddpopt.fuzz.journal import CampaignPlan, Entry, Journal, Summary, summarized
from ddpopt.fuzz.questions import TORCH, Answer, Outcome, Setting
from ddpopt.fuzz.scripting import save
from ddpopt.fuzz.stream import Source
from ddpopt.fuzz.workers import Worker
from ddpopt.testing.drawn import DrawnModel

UNLOWERED = 25
"""One model in this many runs under torch's optimizer with torch's own smallest bucket."""


@dataclass(frozen=True)
class Budget:
    """How long a campaign runs.

    Attributes:
        seconds: duration of this run; None for no limit.
        examples: number of models of the whole campaign, including earlier runs; None for no limit.
        model_s: limit of one mode of one model, in seconds.
    """

    seconds: float | None = None
    examples: int | None = None
    model_s: float = 120.0


Tell = Callable[[tuple[FoundCase, ...]], None]
"""Called after each model with the failures that it added."""


class Campaign:
    """A campaign in a folder.

    Args:
        journal: the journal in the folder.
        plan: the plan of the campaign.
        limits: how long it runs.
        tell: called after each model.
    """

    def __init__(
        self, journal: Journal, plan: CampaignPlan, limits: Budget, tell: Tell = lambda _: None
    ) -> None:
        self.journal = journal
        self.plan = plan
        self.limits = limits
        self.tell = tell
        self.known = {FoundCase.read(file).key for file in sorted(journal.cases.glob("*.json"))}
        self._worker = Worker(limits.model_s)

    def run(self) -> Summary:
        """Run until a limit, or until Ctrl-C.

        Returns:
            The summary of the whole campaign, including earlier runs.
        """
        started = time.monotonic()
        plan = self.plan
        limits = self.limits
        source = Source(plan.seed, plan.shard, plan.without)
        with contextlib.suppress(KeyboardInterrupt), self._worker:
            for place, model in source.models(self.journal.next_place):
                late = limits.seconds is not None and time.monotonic() > started + limits.seconds
                if late or (limits.examples is not None and place >= limits.examples):
                    break
                self._judge(place, model)
        return self.summary()

    def summary(self) -> Summary:
        """The summary so far."""
        return summarized(self.plan, self.journal.entries)

    def _judge(self, place: int, model: DrawnModel) -> None:
        # one in UNLOWERED models runs with torch's own limit, which matters only to torch's optimizer
        unlowered = TORCH in self.plan.modes and place % UNLOWERED == UNLOWERED - 1
        setting = Setting(self.plan.backend, self.plan.nproc, lowers_limit=not unlowered)
        began = time.monotonic()
        answers = tuple(self._worker.ask(task_of(model, self.plan.modes, setting)))
        # kept before the entry is written: models in the journal are not judged again
        new = [case for answer in answers if (case := self._kept(place, model, setting, answer)) is not None]
        seconds = round(time.monotonic() - began, 2)
        self.journal.add(Entry(place, seconds, tuple(sorted(model.features)), answers))
        self.tell(tuple(new))

    def _kept(self, place: int, model: DrawnModel, setting: Setting, answer: Answer) -> FoundCase | None:
        """Keep a failure if it is new; it is counted in any case."""
        if answer.kind not in (Outcome.WRONG, Outcome.BACKEND, Outcome.BROKEN) or answer.signature is None:
            return None
        plan = self.plan
        origin = f"seed {plan.seed}, shard {plan.shard}, place {place}, draws {plan.draws}"
        failure = answer.signature, answer.kind, answer.detail
        case = FoundCase(model, answer.mode, setting, *failure, plan.torch, origin)
        if case.key in self.known:
            return None
        self.known.add(case.key)
        save(case, self.journal.cases)
        return case
