"""The two models of a simulation: one in eager DDP and one in the mode under test, each renewed when needed.

Invariant: there are only these two, and one in float64 where rounding is judged, for any number of ranks.
"""

from typing import Any

import torch

from ddpopt.cases.case import Case
from ddpopt.judge.engines.engine import Engine, Named
from ddpopt.judge.engines.modes import mode as mode_named
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.simulation.shared_model import SharedModel, Taken
from ddpopt.judge.simulation.world import Sends, World
from ddpopt.judge.training.trainer import Course


class Models:
    """Makes the models.

    Args:
        subject: the case, under an option.
        mode: the mode.
        backend: the Dynamo backend; None to compile nothing.
        world: the ranks.
        sends: what they send.

    Attributes:
        eager: the model in eager DDP.
        settles: whether the first rank's steps leave eager's reducer ready for another one. If not, each step
            of each rank gets a new reducer, with DDP's initial buckets.
        compiles_for_each: whether each rank compiles for itself, as code depends on the rank.
    """

    def __init__(self, subject: Subject, mode: Engine, backend: Any, world: World, sends: Sends) -> None:
        self._subject = subject
        self._mode = mode
        self._backend = backend
        self._world = world
        self._sends = sends
        self._got: SharedModel | None = None
        self._rank_of_code = 0
        self._maker = 0
        self.settles = True
        self.compiles_for_each = False
        self.eager = self.make_eager()
        self.start = self.eager.start

    def _shared_model(self, case: Case, mode: Engine, backend: Any) -> SharedModel:
        course = Course(case, self._subject.option, backend, self._subject.steps)
        self._world.become(self._maker)
        made = SharedModel(course, mode, self._world, self._sends, self._subject.device)
        self._world.become(0)
        return made

    def make_eager(self, case: Case | None = None, rank: int = 0) -> SharedModel:
        """Make a model in eager DDP, by default of the subject's case, as a rank."""
        case = case or self._subject.adapted
        self._maker = rank
        made = self._shared_model(case, mode_named("eager"), None)
        if self.settles and not made.settle(made.start):
            self.settles = False
            made.close()
            made = self._shared_model(case, mode_named("eager"), None)
        return made

    def make_for_each(self) -> None:
        """From now on each rank gets a model that was made as that rank."""
        self.settles = False

    def renew_eager(self, rank: int = 0) -> None:
        """Replace eager's model, whose reducer waits for gradients that never come; make it as a rank."""
        kept = self.eager
        self.eager = self.make_eager(rank=rank)
        self.eager.remember(kept)
        kept.close()

    @property
    def got(self) -> SharedModel:
        """The model in the mode; made when it is first needed."""
        if self._got is None:
            self._got = self._shared_model(self._subject.adapted, self._mode, self._backend)
            self._got.settle(self.start)
        return self._got

    def got_as(self, rank: int) -> SharedModel:
        """The model in the mode, with code that a rank may run."""
        if self.compiles_for_each and rank != self._rank_of_code:
            self.renew_code(rank)
        return self.got

    def may_be_code_of_another(self, rank: int) -> bool:
        """Whether a rank runs code that was compiled for another one, and that may not be right for it."""
        return self._backend is not None and rank != self._rank_of_code and not self.compiles_for_each

    def renew_code(self, rank: int) -> None:
        """Forget what was compiled, so that a rank compiles for itself."""
        torch._dynamo.reset()
        self._rank_of_code = rank

    def graphs_alone(self, rank: int, step: int, start: Named) -> tuple[str, ...]:
        """What a rank compiles in a step if it is the only one of this process, as on ranks of their own."""
        torch._dynamo.reset()
        alone = self._shared_model(self._subject.adapted, self._mode, self._backend)
        taken: list[Taken] = [alone.step(rank, each, start) for each in range(step + 1)]
        alone.close()
        return taken[-1].compiled
