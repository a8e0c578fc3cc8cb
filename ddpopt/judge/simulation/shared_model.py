"""One model that is each simulated rank's in turn, and what it leaves and sends as that rank.

Invariant: a rank's step begins with the parameters and buffers that it is given, and with what the modules
kept after its own last step, whichever rank was simulated in between.
"""

import contextlib
import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ddpopt.cases.case import Case
from ddpopt.ddp.held import running_reducer
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.state import state_of
from ddpopt.errors import UsageError
from ddpopt.judge.engines.engine import Engine, Named
from ddpopt.judge.simulation.attributes import Remembered, kept, restore
from ddpopt.judge.simulation.causes import Line, noting_lines
from ddpopt.judge.simulation.world import RankSend, Sends, World
from ddpopt.judge.training.moments import evaluate, extra_step
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.surroundings import settings_kept
from ddpopt.judge.training.train import made_trainer, record_training_step
from ddpopt.judge.training.trainer import Course, Place, evaluating
from ddpopt.judge.training.whole_step import whole_step
from ddpopt.observation.launches import Launch, words_of
from ddpopt.observation.observe import Observation, observe
from ddpopt.planning.plan import Plan

SETTLING = 2
"""Steps after which DDP has rebuilt its buckets, and the first rank's graphs are compiled, as a rule."""
LONGEST_SETTLING = 8
SEEN = 2
"""The first ranks, of which the state of the process and of memory is recorded, too: that takes time."""


@dataclass(frozen=True)
class Taken:
    """One step of one rank.

    Attributes:
        record: what it left, as a run of one step.
        sent: the collectives that it would send, in order.
        compiled: the graphs that Dynamo compiled in it.
        form: the form of its inputs.
        is_complete: whether the reducer got all its gradients; if not, it can take no further step.
    """

    record: Record
    sent: tuple[RankSend, ...]
    compiled: tuple[str, ...]
    form: str
    is_complete: bool


class SharedModel:
    """A data-parallel model that all simulated ranks share.

    Args:
        course: how it is trained.
        mode: how it is made data-parallel.
        world: the ranks.
        sends: what they send.
        device: the device of the model.

    Attributes:
        trainer: the model, and everything to train it.
        start: parameters and buffers at first.
        first: the records of its very first steps; empty until it has settled.
    """

    def __init__(
        self, course: Course, mode: Engine, world: World, sends: Sends, device: torch.device
    ) -> None:
        group: Any = world.group
        self._course = course
        self._mode = mode
        self._world = world
        self._sends = sends
        self.trainer = made_trainer(course, mode, Place(0, world.size, group, device))
        self.start = self.trainer.record.start
        self._take_once = self._way()
        self._parts = dict(self.trainer.parallel.model.named_modules())
        self._updates = copy.deepcopy(self.trainer.updates.state())
        self._fresh = Remembered(kept(self._parts), self._updates)
        self._of_ranks: dict[int, Remembered] = {}
        self._around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._observed: dict[tuple[Launch, ...], Observation] = {}
        self.first: list[Record] = []
        self._before = self._fresh
        ddp = self.trainer.ddp
        self._keeps_buffers = ddp is not None and not ddp.broadcast_buffers

    def settle(self, start: Named) -> bool:
        """Take the first rank's first steps; whether the reducer could finish them."""
        taken: list[Taken] = []
        try:
            while len(taken) < SETTLING or not _alike(*taken[-2:]):
                taken.append(self.step(0, 0, start, is_repeated=True))
                if not taken[-1].is_complete or len(taken) == LONGEST_SETTLING:
                    return False
        except Exception:  # the steps of each rank show what fails
            return False
        finally:
            self.first = [one.record for one in taken[:SETTLING]]
            for record in self.first:  # DDP moves gradients when it rebuilds its buckets
                record.steps[0].sharing = None
        return True

    def begins(self, rank: int, start: Named) -> Named:
        """What a rank's next step starts from: DDP may leave buffers to each rank."""
        return start | self._of(rank).buffers

    def step(
        self, rank: int, step: int, start: Named, *, case: Case | None = None, is_repeated: bool = False
    ) -> Taken:
        """Take one step as one rank, without updating the parameters.

        Args:
            rank: the rank.
            step: index of the step.
            start: parameters and buffers to start from.
            case: another case of the same model, with other inputs.
            is_repeated: whether the rank takes this step once more later; it then remembers nothing of it.
        """
        trainer = self.trainer
        trainer.place = replace(trainer.place, rank=rank)
        trainer.step = step
        own_case = trainer.case
        forms: list[str] = []
        trainer.case = _noting_forms(own_case if case is None else case, forms)
        self._restore(rank)
        trainer.parallel.load(start)
        trainer.record = self._new_record(start)
        trainer.sees_all = rank < SEEN
        if trainer.sees_all:
            trainer.updates.load(copy.deepcopy(self._of(rank).updates))
            trainer.sight.forget_changes()  # what was changed before is not of this step
        self._world.become(rank)
        self._sends.sent.clear()
        try:
            with settings_kept(), torch.enable_grad():
                taken = self._taken(forms, is_observed=rank == 0)
        finally:
            trainer.case = own_case
            self._world.become(0)
        if not is_repeated:
            self._remember(rank, taken)
        return taken

    def _restore(self, rank: int) -> None:
        """Give the modules what the rank's last step left: attributes, and whether buffers are sent next."""
        restore(self._parts, self._of(rank).attributes)
        if self.trainer.ddp is not None:
            self.trainer.ddp.require_forward_param_sync = self._of(rank).broadcasts

    def _of(self, rank: int) -> Remembered:
        return self._of_ranks.get(rank, self._fresh)

    def undo(self, rank: int) -> None:
        """Forget what the rank remembered of its last step, which it takes again."""
        self._of_ranks[rank] = self._before

    def _remember(self, rank: int, taken: Taken) -> None:
        """Keep what the rank's next step begins with."""
        trainer = self.trainer
        self._before = self._of(rank)
        names = dict(trainer.parallel.model.named_buffers()) if self._keeps_buffers else {}
        self._of_ranks[rank] = Remembered(
            attributes=kept(self._parts),
            updates=copy.deepcopy(trainer.updates.state()) if rank < SEEN else self._before.updates,
            buffers={name: taken.record.steps[0].state[name] for name in names},
            broadcasts=trainer.ddp is None or trainer.ddp.require_forward_param_sync,
        )

    def _new_record(self, start: Named) -> Record:
        before = self.trainer.record
        return Record(start, [start], planned=before.planned, ignored=before.ignored, recipe=before.recipe)

    def _taken(self, forms: list[str], *, is_observed: bool) -> Taken:
        trainer = self.trainer
        record = trainer.record
        graphs = len(trainer.compilations.graphs)
        observation = self._observation() if is_observed and self._mode.observable else None
        trainer.compilations.start()
        try:
            with observation or contextlib.nullcontext():
                record_training_step(trainer, self._course.option, self._take, self._update)
        finally:
            trainer.compilations.stop()
        record.graphs = tuple(trainer.compilations.graphs)
        launches = tuple(one.launch for one in self._sends.sent)
        if observation is not None:
            self._observed[launches] = observation
        known = self._observed.get(launches)
        if known is not None:
            record.iterations = known.iterations
            record.collectives = known.collectives
            record.elsewhere = known.elsewhere
        record.plan = self._plan()
        if not self._mode.observable and not self._mode.default_group:
            record.foreign = tuple(
                words_of(one) for one in launches if one.group == self._world.default_group
            )
        compiled = record.graphs[graphs:]
        return Taken(record, tuple(self._sends.sent), compiled, "; ".join(forms), self._is_complete())

    def _plan(self) -> Plan | None:
        ddp = self.trainer.ddp
        if ddp is None:
            return None
        return imposed_plan(ddp) if self.trainer.parallel.whole is None else state_of(ddp).step_plan

    def _observation(self) -> Observation | None:
        try:
            return observe(self.trainer.ddp)
        except UsageError as error:  # it reduces without buckets
            self.trainer.record.unjudged += (f"buckets and collectives ({error})",)
            return None

    def _is_complete(self) -> bool:
        if self.trainer.ddp is None:
            return True
        try:
            running_reducer(self.trainer.ddp)._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def remember(self, other: "SharedModel") -> None:
        """Take over what each rank's modules kept in another model of the same kind."""
        self._updates = other._updates
        self._of_ranks = other._of_ranks

    def evaluated(
        self,
        rank: int,
        step: int,
        start: Named,
        final: Named,
        names: Sequence[str],
        case: Case | None = None,
    ) -> Record:
        """Take a step once more, evaluate after it, and take extra steps.

        Args:
            rank: the rank.
            step: index of the step.
            start: parameters and buffers before it.
            final: those after it.
            names: of the extra steps.
            case: another case of the same model, with other inputs.

        Returns:
            The record of all.

        Raises:
            ExtraStepError: an extra step failed.
        """
        trainer = self.trainer
        self.step(rank, step, start, case=case, is_repeated=True)
        own_case = trainer.case
        trainer.case = own_case if case is None else case
        self._world.become(rank)
        trainer.record.follow = [start, final]
        trainer.is_training = False
        try:
            evaluate(trainer)
            trainer.record.follow = [start]
            for name in names:
                extra_step(trainer, name)
        finally:
            trainer.is_training = True
            trainer.case = own_case
            self._world.become(0)
        return trainer.record

    def sent_in_evaluation(self, rank: int, step: int, state: Named) -> tuple[RankSend, ...]:
        """What a rank sends when it evaluates the model.

        Args:
            rank: the rank.
            step: index of the step whose batch it is given.
            state: parameters and buffers.
        """
        trainer = self.trainer
        trainer.place = replace(trainer.place, rank=rank)
        trainer.step = step
        self._restore(rank)
        trainer.parallel.load(state)
        trainer.extras = {}
        trainer.sight.before_step(keep=False)  # it holds what the rank before this one was given
        trainer.seed()
        self._world.become(rank)
        self._sends.sent.clear()
        try:
            with evaluating(trainer.parallel.model), torch.no_grad(), self._around():
                trainer.forward()
        finally:
            self._world.become(0)
        return tuple(self._sends.sent)

    def lines_of_evaluation(self, rank: int, step: int, state: Named) -> list[Line]:
        """The lines of the program that run in a rank's evaluation, until it fails if it does."""
        return self._lines(lambda: self.sent_in_evaluation(rank, step, state))

    def _update(self) -> None:
        """Let the optimizer take one rank's part of the gradients, to judge what it does with them."""
        if self.trainer.sees_all:
            self.trainer.updates.step()

    def lines(self, rank: int, step: int, start: Named) -> list[Line]:
        """The lines of the program that run in a rank's step, until it fails if it does."""
        return self._lines(lambda: self.step(rank, step, start, is_repeated=True))

    def _lines(self, run: Callable[[], object]) -> list[Line]:
        lines: list[Line] = []
        self._around = lambda: noting_lines(lines)
        with contextlib.suppress(Exception):  # it has been reported
            run()
        self._around = contextlib.nullcontext
        return lines

    def _way(self) -> Callable[[], None]:
        option = self._course.option
        whole = self.trainer.parallel.whole
        if whole is None:
            return partial(option.take_step, self.trainer)
        return whole_step(self.trainer, option.take_step, whole, captures_update=False)

    def _take(self) -> None:
        with self._around():
            self._take_once()

    def update(self, start: Named, gradients: dict[str, Tensor | None], after: Named) -> Named:
        """Let the optimizer take gradients.

        Args:
            start: parameters and buffers before the step.
            gradients: the reduced gradients of the step.
            after: parameters and buffers after the first rank's step, whose buffers the others get.

        Returns:
            Parameters and buffers after it.
        """
        trainer = self.trainer
        trainer.parallel.load(after | {name: start[name] for name in gradients})
        own = [(parameter, parameter.grad) for _, parameter in trainer.parallel.named_parameters()]
        for name, parameter in trainer.parallel.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = gradient if gradient is None else gradient.to(parameter)
        if self._course.option.finish_step is not None:
            self._course.option.finish_step(trainer)
        trainer.updates.load(copy.deepcopy(self._updates))
        trainer.updates.step()
        self._updates = copy.deepcopy(trainer.updates.state())
        for parameter, gradient in own:  # which may be views of buckets
            parameter.grad = gradient
        return trainer.parallel.state()

    def close(self) -> None:
        """Free the model: a DDP module and its reducer are in reference cycles through their hooks."""
        del self.trainer, self._parts
        gc.collect()


def _alike(one: Taken, other: Taken) -> bool:
    """Whether two steps sent the same."""
    return [sent.launch for sent in one.sent] == [sent.launch for sent in other.sent]


def _noting_forms(case: Case, forms: list[str]) -> Case:
    """The case, whose inputs leave their forms in a list."""

    def inputs(rank: int, step: int) -> Any:
        call = case.inputs(rank, step)
        found = tree_leaves(call)
        forms.append(", ".join(str((leaf.dtype, leaf.shape)) for leaf in found if isinstance(leaf, Tensor)))
        return call

    return replace(case, inputs=inputs)
