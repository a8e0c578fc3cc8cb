"""What simulated ranks send when they evaluate the model, which often only one of them does otherwise.

Invariant: an evaluation changes nothing for what follows.
"""

from collections.abc import Iterator

from ddpopt.judge.engines.engine import Named
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.simulation.early import mode_fails
from ddpopt.judge.simulation.models import Models
from ddpopt.judge.simulation.program import Failures, Why, finding_of
from ddpopt.judge.simulation.sequences import Sequences
from ddpopt.judge.simulation.shared_model import SharedModel
from ddpopt.judge.simulation.world import World
from ddpopt.judge.verdict import Finding

MOMENT = "in an evaluation after the last step"


class Evaluations:
    """Lets each rank evaluate the model after the last step.

    Args:
        models: the models.
        world: the ranks.
        subject: the case.
    """

    def __init__(self, models: Models, world: World, subject: Subject) -> None:
        self._models = models
        self._world = world
        self._subject = subject
        self._last = subject.steps - 1

    def findings(self, mode: str, state: Named) -> Iterator[Finding]:
        """What differs between ranks: in eager, or in the mode if nothing does in eager.

        Args:
            mode: the name of the mode.
            state: parameters and buffers after the last step.
        """
        failures = Failures(self._world.size)
        sent = Sequences(self._world.members)
        for rank in range(self._world.size):
            try:
                sent.add(rank, self._models.eager.sent_in_evaluation(rank, self._last, state))
            except Exception as error:
                failures.add(rank, error)
        if failures.are_of_all:
            return
        found = [
            *failures.findings(self._last, MOMENT),
            *self._unlike(self._models.eager, "eager", sent, state),
        ]
        yield from found
        if found or mode == "eager":
            return
        in_mode = Sequences(self._world.members)
        for rank in range(self._world.size):
            model = self._models.got_as(rank)
            try:
                in_mode.add(rank, model.sent_in_evaluation(rank, self._last, state))
            except Exception as error:
                raise mode_fails(rank, error) from error
        yield from self._unlike(self._models.got, mode, in_mode, state)

    def _unlike(self, model: SharedModel, mode: str, sent: Sequences, state: Named) -> Iterator[Finding]:
        why = Why(
            self._world,
            self._subject.adapted,
            lambda rank, step: model.lines_of_evaluation(rank, step, state),
        )
        for parting in sent.partings():
            yield finding_of(parting, self._last, mode=mode, unused={}, why=why, moment=MOMENT)
