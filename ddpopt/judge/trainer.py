"""Train a few steps in one mode, and record everything on which two modes must agree.

An option's step uses a `Trainer`. Training adds no collectives, because ranks may take different numbers of
steps. Invariant: equal cases, options and modes give equal records, except for values that a machine does not
reproduce.
"""

import contextlib
import functools
import gc
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cases.case import Case, on_device, step_seed
from ddpopt.ddp.impose import imposed_plan
from ddpopt.errors import UsageError
from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.engine import Engine, Gives, Gradients, Named
from ddpopt.judge.judging.record import Record, RecordedStep, unreduced
from ddpopt.judge.meshes import has_parts, put_back
from ddpopt.judge.option_cases import differing
from ddpopt.judge.updating import Recipe, Updates
from ddpopt.judge.visible import Sight, form_of
from ddpopt.judge.whole_step import whole_step
from ddpopt.observation.compilations import Compilations
from ddpopt.observation.launches import Launch, LaunchMode
from ddpopt.observation.observe import Collective, observe
from ddpopt.step.settings import RUNNING


@dataclass(frozen=True)
class Place:
    """The place of this process in a run.

    Attributes:
        rank: rank in the training group.
        size: size of that group.
        group: its process group.
        device: the device of the model.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device


class Trainer:
    """One model in one mode, as an option's step sees it.

    Attributes:
        case: the case to train.
        place: the place of this process.
        parallel: the engine with the model.
        updates: how its parameters are updated.
        make: makes another model with the same weights.
        other: a second model that an option trains in the same process.
        step: index of the current step.
        record: the record so far.
        extras: values of the step that a script can see (found by `sight`), and values that the option adds.
        compilations: the graphs that Dynamo compiles during the run.
    """

    def __init__(self, case: Case, place: Place, make: Callable[[], Engine], recipe: Recipe | None) -> None:
        self.case = case
        self.place = place
        self.make = make
        self.parallel = make()
        self.updates = Updates(recipe, self.parallel)
        self.other: Engine | None = None
        self.sight = Sight((case.inputs, case.loss), self.parallel.model)
        self.step = 0
        self.last_loss: Tensor | None = None
        self.extras: dict[str, Any] = {}
        self.compilations = Compilations()
        self.launches: list[Launch] = []
        # two DDP modules that reduce the same gradients follow no plan
        modules = self.ddp.modules() if self.parallel.planned else ()
        planned = sum(isinstance(module, DistributedDataParallel) for module in modules) == 1
        self.record = Record(self.parallel.state(), planned=planned)

    @property
    def ddp(self) -> Any:
        """The DDP module; None if the mode has none."""
        return self.parallel.ddp

    def loss(self, part: int = 0) -> Tensor:
        """Run a forward on the inputs of this rank, step and part of the step; return the loss."""
        loss = self.case.loss(self.forward(part))
        self.sight.reach(loss)
        self.last_loss = loss.detach()
        return loss

    def forward(self, part: int = 0) -> Any:
        """Return the output of the model for the inputs of a part."""
        args, kwargs = self.inputs(part)
        self.sight.calls(args, kwargs)
        output = self.parallel.call(*args, **kwargs)
        self.extras |= self.sight.returns(output)
        return output

    def inputs(self, part: int) -> Any:
        """Return the inputs of a part, and seed its random numbers."""
        source = self.place.rank + part * self.place.size
        torch.manual_seed(step_seed(source, self.step))
        return on_device(self.case.inputs(source, self.step), self.place.device)

    def backward(self, loss: Tensor) -> None:
        """Run a backward in the way of the mode."""
        with self.parallel.around_backward():
            self.parallel.backward(loss)


def plain_step(trainer: Trainer) -> None:
    """One forward, one backward."""
    trainer.backward(trainer.loss())


@dataclass(frozen=True)
class Option:
    """One way to use a data-parallel model: its changes, how it is trained, and which checks apply.

    Attributes:
        name: the name, as in ``--options``.
        about: a description in one sentence.
        needs: the part of DDP it needs: ``"nothing"``: any mode works; ``"arguments"``; ``"module"``.
        ddp_kwargs: DDP's arguments, overriding the case's own.
        adapt: changes the case.
        grouped: changes the case for one run, given its process group.
        configure: called once the model is data-parallel, to add hooks or communication hooks.
        around: context manager for the whole training, for instance ``ddp.join()``.
        steps: the number of steps of a rank, given the requested number; may differ between ranks.
        before_step: called at the start of each step.
        take_step: runs the forwards and backwards of one step.
        finish_step: called between the backward and the optimizer, for clipping or unscaling.
        keeps_gradients: whether gradients are zeroed in place instead of set to None.
        local: whether the reduced gradient is the mean over ranks of what the model alone computes.
        comm_dtype: the dtype in which gradients are sent, if not their own.
        recipe: the optimizer, and what is around it; None for plain SGD.
        resumes: whether new processes take all steps but the first, from a checkpoint.
        probes: whether one more, unreduced step may be run.
        more_graphs: whether ranks may compile more graphs than the model alone, and different ones.
        sends_as_usual: whether each step sends each bucket once, in the same order on all ranks, and the
            model sends nothing else.
        forwards: the number of forwards in one backward.
        computes: the dtype in which operations round, if not that of their parameters. Uncompiled code then
            reuses casts that compiled code repeats, so they differ in their last bits.
    """

    name: str
    about: str
    needs: Gives = "nothing"
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    adapt: Callable[[Case], Case] = lambda case: case
    grouped: Callable[[Case, dist.ProcessGroup], Case] = lambda case, _: case
    configure: Callable[[Trainer], None] = lambda _: None
    around: Callable[[Trainer], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
    steps: Callable[[Place, int], int] = lambda _, steps: steps
    before_step: Callable[[Trainer], None] = lambda _: None
    take_step: Callable[[Trainer], None] = plain_step
    finish_step: Callable[[Trainer], None] | None = None
    keeps_gradients: bool = False
    local: bool = True
    comm_dtype: torch.dtype | None = None
    recipe: Recipe | None = None
    resumes: bool = False
    probes: bool = False
    more_graphs: bool = False
    sends_as_usual: bool = True
    forwards: int = 1
    computes: torch.dtype | None = None


@dataclass(frozen=True)
class Course:
    """How a case is trained.

    Attributes:
        case: the case to train.
        option: how DDP is used.
        backend: the Dynamo backend, for modes that compile; None to compile nothing.
        steps: the number of steps.
        follow: parameters and buffers to start each step from; by default each step continues from the last.
        checkpoint: the number of steps before, and the state that they left; None for a new training.
        evaluate: whether to run the model after the last step, in evaluation mode and without gradients.
        tamper: called once the model is data-parallel and configured; for injected faults.
    """

    case: Case
    option: Option
    backend: Any
    steps: int
    follow: Sequence[Named] | None = None
    checkpoint: Any = None
    evaluate: bool = False
    tamper: Callable[[Trainer], None] = lambda _: None


def train(course: Course, mode: Engine, place: Place) -> Record:
    """Train a case for some steps in a mode.

    Returns:
        The record. A run that fails raises the exception of the step.
    """
    with mode.running(), contextlib.ExitStack() as stack:
        stack.callback(gc.collect)  # a DDP module and its reducer are in reference cycles through their hooks
        make = functools.partial(_make, course, mode, place)
        trainer = Trainer(course.case, place, make, course.option.recipe)
        trainer.record.follow = course.follow
        trainer.record.ignored = frozenset(getattr(trainer.ddp, "parameters_to_ignore", ()))
        course.option.configure(trainer)
        course.tamper(trainer)
        whole = trainer.parallel.whole
        take: Callable[[], None] = functools.partial(course.option.take_step, trainer)
        if whole is not None:
            take = whole_step(trainer, course.option.take_step, whole)
        first = 0
        if course.checkpoint is not None:
            first, state, updates = course.checkpoint
            trainer.parallel.load(state)
            trainer.updates.load(updates)
        with _watched(trainer, mode), course.option.around(trainer):
            for trainer.step in range(first, course.option.steps(place, course.steps)):
                if course.follow is not None:
                    trainer.parallel.load(course.follow[trainer.step])
                _one_step(trainer, course.option, take)
        if course.option.probes and trainer.ddp is not None:
            _probe(trainer, course.option)
        if course.evaluate:
            _evaluate(trainer)
        if course.option.resumes:
            trainer.record.checkpoint = course.steps, trainer.parallel.state(), trainer.updates.state()
        return trainer.record


def _make(course: Course, mode: Engine, place: Place) -> Engine:
    torch.manual_seed(step_seed(0, 0))
    model = course.case.model().to(place.device)
    arguments = differing(course.case, course.option.ddp_kwargs).ddp_kwargs if mode.gives != "nothing" else {}
    backend = course.backend if mode.compiles else None
    if backend is None:
        put_back(model)
    return mode.prepared(model, place.group, backend, arguments)


@contextlib.contextmanager
def _watched(trainer: Trainer, mode: Engine) -> Iterator[None]:
    """Count graphs and captures, and observe the reducer if there is one."""
    record, ddp = trainer.record, trainer.ddp
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
        record.captures = counters["compiled_autograd"]["captures"] - captures
    record.promised = trainer.parallel.sends()
    record.collectives = tuple(Collective(one.op, one.nbytes, one.dtype, None) for one in trainer.launches)
    if observation is not None:
        record.iterations = observation.iterations
        record.collectives = observation.collectives
        record.elsewhere = observation.elsewhere
        record.plan = RUNNING.get(ddp) if trainer.parallel.whole is not None else imposed_plan(ddp)


def _one_step(trainer: Trainer, option: Option, take: Callable[[], None]) -> None:
    trainer.extras = {}
    trainer.parallel.zero_grad(set_to_none=not option.keeps_gradients)
    option.before_step(trainer)
    trainer.sight.before_step(keep=option.keeps_gradients)
    sent = _sending(trainer, take)
    random = random_state(trainer.place.device)
    trainer.extras |= trainer.sight.after_step() | trainer.sight.settings(trainer.place.device)
    sharing, written = (None, ()) if trainer.ddp is None else trainer.sight.memory()
    gradients, early = trainer.parallel.gradients(), set(trainer.extras)
    final: Gradients = {}
    if option.finish_step is not None:
        option.finish_step(trainer)
        final = trainer.parallel.gradients()
    sent += _sending(trainer, trainer.updates.step)
    trainer.record.sent.append(sent)
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
    """Run the model once from the first step's initial state, and twice from eager's final state."""
    record = trainer.record
    states, last = record.follow or record.starts, len(record.steps)
    extras: dict[str, Any] = {}
    sharing: frozenset[tuple[str, str]] = frozenset()
    with contextlib.ExitStack() as stack:
        for part in trainer.parallel.model.modules():
            stack.callback(setattr, part, "training", part.training)
        trainer.parallel.model.eval()
        # attention must compute what compiled code computes, without its fast-path kernel
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        ways: list[Any] = [("first evaluation", 0, torch.no_grad), ("evaluation", last, torch.no_grad)]
        if not has_parts(trainer.parallel.model):  # DTensor's layers compute in another order in inference
            ways.append(("inference", last, torch.inference_mode))
        for name, steps, without_gradients in ways:
            trainer.parallel.load(states[steps])
            trainer.step = max(0, steps - 1)
            trainer.extras = {}
            trainer.parallel.zero_grad()
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
                # an inference tensor may not be used outside inference mode
                extras[f"{name}'s {what}"] = value.clone() if is_of_inference else value
    trained = record.steps[-1].gradients
    state = {name: tensor for name, tensor in trainer.parallel.state().items() if name not in trained}
    random, shared = random_state(trainer.place.device), None if trainer.ddp is None else sharing
    record.evaluation = RecordedStep(None, {}, state, random, extras, sharing=shared)


def _changed(trainer: Trainer, before: Named) -> Iterator[str]:
    """Names of parameters and buffers that changed in value, form or gradient."""
    now = trainer.parallel.state()
    gradients = trainer.parallel.gradients()
    for name, tensor in before.items():
        is_as_before = form_of(now[name]) == form_of(tensor) and torch.equal(now[name], tensor)
        if not is_as_before or gradients.get(name) is not None:
            yield name


def random_state(device: torch.device) -> Tensor:
    """Return the states of the generators that a model on a device draws from: the CPU's and the GPU's."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.random.get_rng_state(), *own])


def _probe(trainer: Trainer, option: Option) -> None:
    """Repeat the last step under no_sync."""
    record, ddp = trainer.record, trainer.ddp
    trainer.step = len(record.steps) - 1
    trainer.parallel.load(record.starts[trainer.step])
    trainer.parallel.zero_grad()
    broadcasts = ddp.require_forward_param_sync
    with trainer.parallel.no_sync():
        option.take_step(trainer)
    ddp.require_forward_param_sync = broadcasts  # broadcasts buffers before the next forward
    gradients = {unreduced(name): gradient for name, gradient in trainer.parallel.gradients().items()}
    record.local = RecordedStep(None, {}, {}, random_state(trainer.place.device), gradients)


def _sending(trainer: Trainer, act: Callable[[], None]) -> tuple[str, ...]:
    """Do something, and return the collectives that it sends."""
    before = len(trainer.launches)
    act()
    return tuple(f"{one.op} of {one.nbytes} bytes of {one.dtype}" for one in trainer.launches[before:])
