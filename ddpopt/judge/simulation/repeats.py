"""What is found when a rank takes a step again: hidden state, unknown values, and what comes after training.

Invariant: a repeated step changes nothing for the steps of any rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ddpopt.cases.case import Case
from ddpopt.judge.engines.engine import Named
from ddpopt.judge.rules.failing import failure_of
from ddpopt.judge.rules.ladder import NOT_EVALUATED, NOT_TAKEN
from ddpopt.judge.simulation import hidden
from ddpopt.judge.simulation.early import mode_fails
from ddpopt.judge.simulation.models import Models
from ddpopt.judge.simulation.numbers import Again
from ddpopt.judge.simulation.shared_model import SharedModel, Taken
from ddpopt.judge.simulation.world import Sends
from ddpopt.judge.training.moments import EXTRAS, ExtraStepError
from ddpopt.judge.training.record import Record
from ddpopt.judge.verdict import Finding


class Repeats:
    """Lets ranks take steps again.

    Args:
        models: the models.
        sends: what they send.
        is_cheap: whether compiling one more graph costs little.

    Attributes:
        unjudged: what cannot be judged, with the reason.
        findings: what is wrong.
        notes: remarks.
    """

    def __init__(self, models: Models, sends: Sends, *, is_cheap: bool) -> None:
        self._is_cheap = is_cheap
        self._models = models
        self._sends = sends
        self.unjudged: dict[str, None] = {}
        self.findings: list[Finding] = []
        self.notes: dict[str, None] = {}

    @property
    def not_reproduced(self) -> str:
        """What eager leaves or sends otherwise when it takes a step again; empty if nothing."""
        found = [
            reason for reason in self.unjudged if reason.startswith((hidden.STATE, hidden.NOT_REPRODUCED))
        ]
        return "; ".join(found)

    def first_rank(self, index: int, start: Named) -> None:
        """Let the first rank take a step again and again before its turn.

        Args:
            index: index of the step.
            start: parameters and buffers before it.
        """
        models = self._models
        if not models.settles:
            return
        try:
            first, again = (models.eager.step(0, index, start, is_repeated=True) for _ in range(2))
            with self._multiplying():
                multiplied = models.eager.step(0, index, start, is_repeated=True)
        except Exception:  # the steps of each rank show what fails
            models.renew_eager()
            return
        if hidden.other_way(again, first):
            self.unjudged[hidden.STATE] = None
        elif changed := hidden.not_reproduced(again, first):
            self.unjudged[changed] = None
        elif unknown := hidden.unknown(multiplied, first):
            self.unjudged[unknown] = None
        else:
            self._received(index, start, first, multiplied)

    @contextmanager
    def _multiplying(self) -> Iterator[None]:
        self._sends.factor = hidden.FACTOR
        try:
            yield
        finally:
            self._sends.factor = 1.0

    def _received(self, index: int, start: Named, first: Taken, multiplied: Taken) -> None:
        """Compare what the reductions' results become in the mode with what they become in eager."""
        got = self._models.got_as(0)
        try:
            mine = got.step(0, index, start, is_repeated=True)
            with self._multiplying():
                mine_multiplied = got.step(0, index, start, is_repeated=True)
        except Exception as error:
            raise mode_fails(0, error) from error
        self.findings += hidden.not_received(index, (first, multiplied), (mine, mine_multiplied))
        if unknown := hidden.unknown(mine_multiplied, mine):
            self.unjudged[f"in the mode, {unknown}"] = None

    def after_training(
        self, rank: int, last: int, start: Named, final: Named
    ) -> tuple[Record, Record, Again] | None:
        """Let a rank evaluate after its last step, and take extra steps.

        Args:
            rank: the rank.
            last: index of the last step.
            start: parameters and buffers before it.
            final: those after it.

        Returns:
            The records of the mode and of eager, and how a model does the same on other data; None if eager
            cannot be evaluated.
        """
        try:
            eager, names = self._in_eager(rank, last, start, final)
        except Exception as error:
            self.notes[NOT_EVALUATED.format(reason=failure_of(rank, error).text)] = None
            return None

        def again(model: SharedModel, case: Case | None, change: Callable[[Named], Named]) -> Record:
            return model.evaluated(rank, last, change(start), change(final), names, case)

        try:
            got = self._models.got_as(rank).evaluated(rank, last, start, final, names)
        except ExtraStepError as error:
            cause = error.__cause__
            raise mode_fails(rank, cause if isinstance(cause, Exception) else error) from error
        except Exception as error:
            raise mode_fails(rank, error) from error
        return got, eager, again

    def _in_eager(self, rank: int, last: int, start: Named, final: Named) -> tuple[Record, Sequence[str]]:
        """Eager's record, and the extra steps that it can take."""
        names = [name for name, extra in EXTRAS.items() if self._is_cheap or not extra.compiles]
        while True:
            try:
                return self._models.eager.evaluated(rank, last, start, final, names), names
            except ExtraStepError as error:
                names.remove(error.name)
                reason = failure_of(rank, error.__cause__ or error).text
                self.notes[NOT_TAKEN.format(name=error.name, reason=reason)] = None
                self._models.renew_eager()
