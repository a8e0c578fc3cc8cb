"""What simulated ranks send when they evaluate the model, which often only one of them does otherwise.

Invariant: an evaluation changes nothing for what follows.
"""

from collections.abc import Callable, Iterator

from ddpopt.judge.engines.engine import Named
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.rules.outcome import failed
from ddpopt.judge.simulation.causes import Line
from ddpopt.judge.simulation.early import EndedEarlyError
from ddpopt.judge.simulation.models import Models
from ddpopt.judge.simulation.program import EAGER, Failures, Why, finding_of
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
        state: parameters and buffers after the last step.
    """

    def __init__(self, models: Models, world: World, subject: Subject, state: Named) -> None:
        self._models = models
        self._world = world
        self._subject = subject
        self._state = state
        self._last = subject.steps - 1

    def findings(self, mode: str) -> list[Finding]:
        """What differs between ranks: in eager, or in the mode if nothing does in eager.

        Args:
            mode: the name of the mode.

        Raises:
            EndedEarlyError: the mode fails.
        """
        models = self._models
        sent, failures = self._taken(lambda _: models.eager)
        if failures.are_of_all:
            return []
        found = [*failures.findings(self._last, MOMENT), *self._unlike(models.eager, EAGER, sent)]
        if found or mode == EAGER:
            return found
        sent, failures = self._taken(models.got_as)
        if not models.compiles_for_each and (failures.of_ranks or any(sent.partings())):
            models.compiles_for_each = True  # a rank may have run the code of another one
            sent, failures = self._taken(models.got_as)
        if failures.of_ranks:
            raise EndedEarlyError(**failed([*failures.of_ranks.values()]))
        return [*self._unlike(models.got, mode, sent)]

    def _taken(self, model_as: Callable[[int], SharedModel]) -> tuple[Sequences, Failures]:
        """What each rank sends, and which of them fail."""
        sent = Sequences(self._world.members)
        failures = Failures(self._world.size)
        for rank in range(self._world.size):
            try:
                sent.add(rank, model_as(rank).sent_in_evaluation(rank, self._last, self._state))
            except Exception as error:
                failures.add(rank, error)
        return sent, failures

    def _unlike(self, model: SharedModel, mode: str, sent: Sequences) -> Iterator[Finding]:
        def lines(rank: int, step: int) -> list[Line]:
            return model.lines_of_evaluation(rank, step, self._state)

        why = Why(self._world, self._subject.adapted, lines)
        for parting in sent.partings():
            yield finding_of(parting, self._last, mode=mode, unused={}, why=why, moment=MOMENT)
