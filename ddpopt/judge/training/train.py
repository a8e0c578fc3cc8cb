"""Train a few steps in one mode, and record everything on which two modes must agree.

Invariant: equal cases, options and modes give equal records, except for values that a machine does not
reproduce.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters

from ddpopt.cases.case import step_seed
from ddpopt.cases.option_cases import differing
from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.state import state_of
from ddpopt.errors import UsageError
from ddpopt.judge.engines.engine import Engine, Gradients, Named
from ddpopt.judge.engines.meshes import put_back
from ddpopt.judge.training.memory import Pairs
from ddpopt.judge.training.moments import evaluate, extra_step, probe
from ddpopt.judge.training.record import Record, RecordedStep, optimizer_state
from ddpopt.judge.training.trainer import Course, Option, Place, Trainer, random_state
from ddpopt.judge.training.visible import REMADE_BY_OPTIMIZER
from ddpopt.judge.training.whole_step import whole_step
from ddpopt.observation.events import Collective
from ddpopt.observation.launches import LaunchMode
from ddpopt.observation.observe import observe


def train(course: Course, mode: Engine, place: Place) -> Record:
    """Train a case for some steps in a mode.

    Returns:
        The record. A run that fails raises the exception of the step.
    """
    with mode.running(), contextlib.ExitStack() as stack:
        stack.callback(gc.collect)  # a DDP module and its reducer are in reference cycles through their hooks
        trainer = made_trainer(course, mode, place)
        take, update = _ways(trainer, course.option)
        trainer.advance = lambda: (take(), update())
        first = 0
        if course.checkpoint is not None:
            first, state, updates = course.checkpoint
            trainer.parallel.load(state)
            trainer.updates.load(updates)
        with _watched(trainer, mode), course.option.around(trainer):
            for trainer.step in range(first, course.option.steps(place, course.steps)):
                if course.follow is not None:
                    trainer.parallel.load(course.follow[trainer.step])
                record_training_step(trainer, course.option, take, update)
                if course.each is not None:
                    course.each(trainer.record.steps.pop())
        trainer.is_training = False
        if course.evaluate:
            evaluate(trainer)
        for name in course.extras:
            extra_step(trainer, name)
        # last, as not every engine does it: a model that counts its forwards must count alike until here
        if course.option.probes and trainer.ddp is not None:
            probe(trainer, course.option)
        if course.option.resumes:
            trainer.record.checkpoint = course.steps, trainer.parallel.state(), trainer.updates.state()
        return trainer.record


def made_trainer(course: Course, mode: Engine, place: Place) -> Trainer:
    """Make a model, data-parallel in a mode and configured by the option, and everything to train it."""
    make = functools.partial(_make, course, mode, place)
    trainer = Trainer(course.case, place, make, course.option.recipe, has_momentum=course.has_momentum)
    trainer.record.follow = course.follow
    trainer.record.ignored = frozenset(getattr(trainer.ddp, "parameters_to_ignore", ()))
    trainer.record.recipe = trainer.recipe
    course.option.configure(trainer)
    course.tamper(trainer)
    return trainer


def _make(course: Course, mode: Engine, place: Place) -> Engine:
    torch.manual_seed(step_seed(0, 0))
    model = course.case.model().to(place.device)
    arguments = differing(course.case, course.option.ddp_kwargs).ddp_kwargs if mode.gives != "nothing" else {}
    backend = course.backend if mode.compiles else None
    if backend is None:
        put_back(model)
    return mode.prepared(model, place.group, backend, arguments)


def _ways(trainer: Trainer, option: Option) -> tuple[Callable[[], None], Callable[[], None]]:
    """How the forwards and backwards of a step are run, and how its parameters are updated after them."""
    whole = trainer.parallel.whole
    if whole is None:
        return functools.partial(option.take_step, trainer), trainer.updates.step
    trainer.record.captures_step = True
    # what an option does between a backward and its optimizer is not captured, so neither is the optimizer
    is_exact = option.recipe is None or option.recipe.is_exact
    captures_update = trainer.record.captures_update = option.finish_step is None and is_exact
    take = whole_step(trainer, option.take_step, whole, captures_update=captures_update)
    return take, trainer.updates.follow if captures_update else trainer.updates.step


@contextlib.contextmanager
def _watched(trainer: Trainer, mode: Engine) -> Iterator[None]:
    """Count graphs and captures, and observe the reducer if there is one."""
    record = trainer.record
    ddp = trainer.ddp
    captures = counters["compiled_autograd"]["captures"]
    observation = None
    if mode.observable:
        try:
            observation = observe(ddp)
        except UsageError as error:  # it reduces without buckets
            record.unjudged += (f"buckets and collectives ({error})",)
    unseen: Any = contextlib.nullcontext()
    if not mode.observable and not mode.captures_backward:
        unseen = LaunchMode(trainer.launches.append, lambda: None)
    trainer.compilations.start()
    try:
        with observation if observation is not None else unseen:
            yield
    finally:
        trainer.compilations.stop()
        record.graphs = tuple(trainer.compilations.graphs)
        record.given_up = trainer.compilations.given_up
        record.captures = counters["compiled_autograd"]["captures"] - captures
    record.promised = trainer.parallel.sends()
    record.collectives = tuple(
        Collective(one.op, one.nbytes, one.dtype, None, one.how) for one in trainer.launches
    )
    record.foreign = trainer.foreign()
    if observation is not None:
        record.iterations = observation.iterations
        record.collectives = observation.collectives
        record.elsewhere = observation.elsewhere
        record.plan = state_of(ddp).step_plan if trainer.parallel.whole is not None else imposed_plan(ddp)


def record_training_step(
    trainer: Trainer, option: Option, take: Callable[[], None], update: Callable[[], None]
) -> None:
    """Take one step, and add what it leaves to the trainer's record.

    Args:
        trainer: the trainer, in the state that the step starts from.
        option: how DDP is used.
        take: runs the forwards and backwards.
        update: updates the parameters.
    """
    trainer.extras = {}
    trainer.seed()
    trainer.parallel.zero_grad(set_to_none=not option.keeps_gradients)
    option.before_step(trainer)
    trainer.sight.before_step(keep=option.keeps_gradients)
    sent = trainer.sending(take)
    random = random_state(trainer.place.device)
    trainer.extras |= trainer.sight.after_step()
    sharing: Pairs | None = None
    written: tuple[str, ...] = ()
    if trainer.sees_all:
        trainer.extras |= trainer.sight.settings(trainer.place.device)
    if trainer.sees_all and not trainer.parallel.is_sharded:
        sharing, written = trainer.sight.memory()
    gradients = trainer.parallel.gradients()
    early = set(trainer.extras)
    final: Gradients = {}
    if option.finish_step is not None:
        option.finish_step(trainer)
        final = trainer.parallel.gradients()
    sent += trainer.sending(update)
    if trainer.sees_all:
        trainer.extras[REMADE_BY_OPTIMIZER] = trainer.sight.changed_parts()
    trainer.record.sent.append(sent)
    trainer.record.graphs_after.append(len(trainer.compilations.graphs))
    loss = trainer.last_loss
    if loss is None:
        raise RuntimeError("a step ran no forward")
    trainer.record.steps.append(
        RecordedStep(
            moment=f"step {trainer.step}",
            loss=loss.clone(),
            gradients=gradients,
            state=trainer.parallel.state(),
            random=random,
            extras=dict(trainer.extras),
            final=final,
            late=frozenset(trainer.extras.keys() - early),
            sharing=sharing,
            written=written,
            optimizer=_optimizer_state(trainer),
        )
    )


def _optimizer_state(trainer: Trainer) -> Named:
    """The state of a torch optimizer and averages, by name and the parameter's; empty if none are seen."""
    if trainer.parallel.is_sharded or trainer.updates.optimizer is None:
        return {}
    named = [*trainer.parallel.named_parameters()]
    return optimizer_state(trainer.updates.optimizer, named) | trainer.updates.averaged(named)
