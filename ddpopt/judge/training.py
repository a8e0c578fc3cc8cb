"""Some steps of training in one mode, and a record of everything that two modes must agree on.

No collective of ours happens while it trains: ranks may take different numbers of steps. Invariant: equal
cases, options and modes give equal records, but for what a machine does not reproduce.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from ddpopt.cases.case import Case, step_seed
from ddpopt.ddp.impose import KEPT, imposed_plan
from ddpopt.errors import UsageError
from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.judging.record import Record, RecordedStep, unreduced
from ddpopt.judge.modes import Mode
from ddpopt.judge.parallel import Gradients, Named, Parallel, Setup
from ddpopt.judge.trainer import Option, Place, Trainer
from ddpopt.judge.visible import form_of
from ddpopt.observation.observe import observe

LEARNING_RATE = 0.05
"""Of plain SGD: large enough that a stale gradient or a parameter that was not updated shows a step later."""


@dataclass(frozen=True)
class Course:
    """How a case is trained.

    Attributes:
        case: what to train.
        option: how DDP is used.
        backend: Dynamo's, for modes that compile; None to compile nothing.
        steps: how many.
        follow: parameters and buffers to start each step from; else each goes on from the one before.
        evaluate: whether to run the model after the last step, in evaluation mode and without gradients.
        tamper: called once the model is data-parallel and configured; for faults that are put in by hand.
    """

    case: Case
    option: Option
    backend: Any
    steps: int
    follow: Sequence[Named] | None = None
    evaluate: bool = False
    tamper: Callable[[Trainer], None] = lambda _: None


def train(course: Course, mode: Mode, place: Place) -> Record:
    """Train a case for some steps in a mode.

    Returns:
        What happened. A run that fails raises whatever the step raised.
    """
    with mode.running(), contextlib.ExitStack() as stack:
        stack.callback(gc.collect)  # a DDP module is held by its own hooks, and a reducer by them
        trainer = Trainer(course.case, place, functools.partial(_make, course, mode, place))
        trainer.record.follow = course.follow
        trainer.record.ignored = frozenset(getattr(trainer.ddp, "parameters_to_ignore", ()))
        course.option.configure(trainer)
        course.tamper(trainer)
        with _watched(trainer, mode), course.option.around(trainer):
            for trainer.step in range(course.option.steps(place, course.steps)):
                if course.follow is not None:
                    trainer.parallel.load(course.follow[trainer.step])
                _one_step(trainer, course.option)
        if course.option.probes and trainer.ddp is not None:
            _probe(trainer, course.option)
        if course.evaluate:
            _evaluate(trainer)
        return trainer.record


def _make(course: Course, mode: Mode, place: Place) -> Parallel:
    torch.manual_seed(step_seed(0, 0))
    model = course.case.model().to(place.device)
    arguments = course.option.arguments(course.case, model) if mode.gives != "nothing" else {}
    backend = course.backend if mode.compiles else None
    return mode.wrap(Setup(model, place.group, backend, arguments))


@contextlib.contextmanager
def _watched(trainer: Trainer, mode: Mode) -> Iterator[None]:
    """Count graphs and captures, and observe the reducer where there is one."""
    record, ddp = trainer.record, trainer.ddp
    captures = counters["compiled_autograd"]["captures"]
    observation = None
    if mode.observable:
        with contextlib.suppress(UsageError):  # an option that leaves no buckets to see
            observation = observe(ddp)
    trainer.compilations.start()
    try:
        with observation if observation is not None else contextlib.nullcontext():
            yield
    finally:
        trainer.compilations.stop()
        record.graphs = tuple(trainer.compilations.graphs)
        record.captures = counters["compiled_autograd"]["captures"] - captures
    if observation is not None:
        record.iterations = observation.iterations
        record.collectives = observation.collectives
        record.elsewhere = observation.elsewhere
        record.plan, record.kept = imposed_plan(ddp), KEPT.get(ddp, "")


def _one_step(trainer: Trainer, option: Option) -> None:
    trainer.extras = {}
    trainer.parallel.model.zero_grad(set_to_none=not option.keeps_gradients)
    option.before_step(trainer)
    trainer.sight.before_step(keep=option.keeps_gradients)
    option.take_step(trainer)
    random = random_state(trainer.place.device)
    trainer.extras |= trainer.sight.after_step() | trainer.sight.settings(trainer.place.device)
    sharing, written = (None, ()) if trainer.ddp is None else trainer.sight.memory()
    gradients, early = trainer.parallel.gradients(), set(trainer.extras)
    final: Gradients = {}
    if option.finish_step is not None:
        option.finish_step(trainer)
        final = trainer.parallel.gradients()
    _update(trainer)
    trainer.record.graphs_after.append(len(trainer.compilations.graphs))
    loss = trainer.last_loss
    if loss is None:
        raise RuntimeError("a step ran no forward")
    trainer.record.steps.append(
        RecordedStep(
            loss=loss.clone(),
            gradients=gradients,
            state=trainer.parallel.state(),
            random=random,
            extras=dict(trainer.extras),
            final=final,
            late=frozenset(trainer.extras.keys() - early),
            sharing=sharing,
            written=written,
        )
    )


def _evaluate(trainer: Trainer) -> None:
    """Run the model on what the first step began with, and twice on what eager's last step ended with."""
    record = trainer.record
    states, last = record.follow or record.starts, len(record.steps)
    extras: dict[str, Any] = {}
    sharing: frozenset[tuple[str, str]] = frozenset()
    with contextlib.ExitStack() as stack:
        for part in trainer.parallel.model.modules():
            stack.callback(setattr, part, "training", part.training)
        trainer.parallel.model.eval()
        # attention is to compute what compiled code computes, and not by a special kernel
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        for name, steps, without_gradients in (
            ("first evaluation", 0, torch.no_grad),
            ("evaluation", last, torch.no_grad),
            ("inference", last, torch.inference_mode),
        ):
            trainer.parallel.load(states[steps])
            trainer.step = max(0, steps - 1)
            trainer.extras = {}
            trainer.parallel.model.zero_grad()
            before = trainer.parallel.state()
            trainer.sight.before_step(keep=False)
            with without_gradients():
                trainer.forward()
                seen = trainer.extras | trainer.sight.after_step()
                sharing |= trainer.sight.memory()[0]
            seen |= trainer.sight.settings(trainer.place.device)
            seen["list of what it changed"] = ", ".join(_changed(trainer, before)) or "none"
            drawn = random_state(trainer.place.device)
            seen["state of torch's generators"] = hashlib.blake2b(raw_bytes(drawn), digest_size=8).hexdigest()
            for what, value in seen.items():
                is_of_inference = isinstance(value, Tensor) and value.is_inference()
                # a tensor of inference mode may not be used outside of it
                extras[f"{name}'s {what}"] = value.clone() if is_of_inference else value
    trained = record.steps[-1].gradients
    state = {name: tensor for name, tensor in trainer.parallel.state().items() if name not in trained}
    random, shared = random_state(trainer.place.device), None if trainer.ddp is None else sharing
    record.evaluation = RecordedStep(None, {}, state, random, extras, sharing=shared)


def _changed(trainer: Trainer, before: Named) -> Iterator[str]:
    """Names of parameters and buffers that are not as they were: in value, form or gradient."""
    now = trainer.parallel.state()
    gradients = trainer.parallel.gradients()
    for name, tensor in before.items():
        is_as_before = form_of(now[name]) == form_of(tensor) and torch.equal(now[name], tensor)
        if not is_as_before or gradients.get(name) is not None:
            yield name


def random_state(device: torch.device) -> Tensor:
    """Return the states of the generators that a model on a device draws from: the CPU's, the GPU's own."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.random.get_rng_state(), *own])


def _probe(trainer: Trainer, option: Option) -> None:
    """Take the last step once more, under no_sync."""
    record, ddp = trainer.record, trainer.ddp
    trainer.step = len(record.steps) - 1
    trainer.parallel.load(record.starts[trainer.step])
    trainer.parallel.model.zero_grad()
    broadcasts = ddp.require_forward_param_sync
    with trainer.parallel.no_sync():
        option.take_step(trainer)
    ddp.require_forward_param_sync = broadcasts  # of buffers, before the next forward
    gradients = {unreduced(name): gradient for name, gradient in trainer.parallel.gradients().items()}
    record.local = RecordedStep(None, {}, {}, random_state(trainer.place.device), gradients)


def _update(trainer: Trainer) -> None:
    """Plain SGD; an optimizer of torch's would refuse to mix dense and sparse gradients in one call."""
    with torch.no_grad():
        for parameter in trainer.parallel.model.parameters():
            if parameter.grad is not None:
                parameter.copy_(updated(parameter, parameter.grad))


def updated(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """What the optimizer makes of a parameter."""
    return parameter if gradient is None else parameter.add(gradient, alpha=-LEARNING_RATE)
