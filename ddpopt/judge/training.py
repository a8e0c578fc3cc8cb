"""Some steps of training in one mode, and a record of everything that two modes must agree on.

No collective of ours happens while it trains: ranks may take different numbers of steps. Invariant: equal
cases, options and modes give equal records, but for what a machine does not reproduce.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map

from ddpopt.cases.case import Case, step_seed
from ddpopt.ddp.impose import imposed_plan
from ddpopt.errors import UsageError
from ddpopt.judge.judging.record import Record, Step
from ddpopt.judge.modes import Mode, Setup
from ddpopt.judge.parallel import Gradients, Named, Parallel
from ddpopt.judge.visible import GRADIENT_OF, Sight
from ddpopt.observation.compilations import Compilations
from ddpopt.observation.observe import Observation, observe

LEARNING_RATE = 0.05
"""Of plain SGD: large enough that a stale gradient or a parameter that was not updated shows a step later."""


@dataclass(frozen=True)
class Place:
    """Where this process stands.

    Attributes:
        rank: in the group that trains together.
        size: of that group.
        group: its process group.
        device: where the model belongs.
    """

    rank: int
    size: int
    group: dist.ProcessGroup
    device: torch.device


class Trainer:
    """One model in one mode, as an option's step sees it.

    Attributes:
        case: what is trained.
        place: where.
        models: the model; an option may add others.
        step: index of the step that runs.
        record: what is known so far.
        extras: what a script can see of the step (`sight` finds it), and what the option leaves.
        compilations: what Dynamo compiles meanwhile.
    """

    def __init__(self, case: Case, place: Place, make: Callable[[], Parallel]) -> None:
        self.case = case
        self.place = place
        self._make = make
        self.models = [make()]
        self.sight = self._sight()
        self.step = 0
        self.last_loss: Tensor | None = None
        self.extras: dict[str, Any] = {}
        self.compilations = Compilations()
        self.record = Record(self.state(), planned=self.parallel.planned)

    @property
    def parallel(self) -> Parallel:
        """The model that is judged."""
        return self.models[0]

    @property
    def ddp(self) -> Any:
        """Its DDP module; None where the mode has none."""
        return self.parallel.ddp

    def _sight(self) -> Sight:
        models = {_prefix(index): model.model for index, model in enumerate(self.models)}
        return Sight((self.case.inputs, self.case.loss), models)

    def add_model(self) -> None:
        """Make another one, from the same weights."""
        self.models.append(self._make())
        self.sight = self._sight()
        self.record.start = self.state()

    def loss(self, part: int = 0, model: int = 0) -> Tensor:
        """Run a forward on inputs of this rank, step and part of the step."""
        loss = self.case.loss(self.forward(part, model))
        self.sight.reach(loss)
        self.last_loss = loss.detach()
        return loss

    def forward(self, part: int = 0, model: int = 0) -> Any:
        """The output of the model for such inputs."""
        source = self.place.rank + part * self.place.size
        torch.manual_seed(step_seed(source, self.step))
        args, kwargs = on_device(self.case.inputs(source, self.step), self.place.device)
        self.sight.calls(args, kwargs)
        output = self.models[model].call(*args, **kwargs)
        self.extras |= self.sight.returns(output)
        return output

    def backward(self, loss: Tensor) -> None:
        """Run a backward as the mode runs it."""
        with self.parallel.around_backward():
            torch.autograd.backward(loss)
        for model in self.models:
            model.after_backward()

    def no_sync(self) -> AbstractContextManager[Any]:
        """What to run forward and backward in, so that nothing is reduced."""
        return self.parallel.unsynchronised()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of all models."""
        return [parameter for model in self.models for parameter in model.model.parameters()]

    def gradients(self) -> Gradients:
        """Copies of all gradients, by name; those of an added model with its number in front."""
        return _merged([model.gradients() for model in self.models])

    def state(self) -> Named:
        """Copies of all parameters and buffers, by name."""
        return _merged([model.state() for model in self.models])

    def load(self, state: Named) -> None:
        """Set all parameters and buffers."""
        for index, model in enumerate(self.models):
            prefix = _prefix(index)
            model.load({name[len(prefix) :]: t for name, t in state.items() if name.startswith(prefix)})


def _prefix(index: int) -> str:
    return f"model {index + 1}: " if index else ""


Values = TypeVar("Values")


def _merged(parts: Sequence[dict[str, Values]]) -> dict[str, Values]:
    return {
        f"{_prefix(index)}{name}": value for index, part in enumerate(parts) for name, value in part.items()
    }


TakeStep = Callable[[Trainer], None]
"""Forward and backward of one step, however often."""


def nothing_more(_: Trainer) -> None:
    """Do nothing between the backward and the optimizer."""


def plain_step(trainer: Trainer) -> None:
    """One forward, one backward."""
    trainer.backward(trainer.loss())


@dataclass(frozen=True)
class Program:
    """How an option uses a data-parallel model; all of it does nothing by default.

    Attributes:
        take_step: forward and backward.
        finish_step: between the backward and the optimizer: clipping, unscaling.
        configure: once the model is data-parallel: hooks, communication hooks.
        around: what the whole training runs in, for instance ``ddp.join()``.
        steps: how many steps a rank takes, given how many are asked for; may differ between ranks.
        keeps_gradients: whether gradients are zeroed in place instead of dropped.
        before_step: at the start of each step.
    """

    take_step: TakeStep = plain_step
    finish_step: TakeStep = nothing_more
    before_step: TakeStep = lambda _: None
    configure: Callable[[Trainer], None] = lambda _: None
    around: Callable[[Trainer], AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
    steps: Callable[[Place, int], int] = lambda _, steps: steps
    keeps_gradients: bool = False

    @property
    def finishes(self) -> bool:
        """Whether anything happens to gradients between the backward and the optimizer."""
        return self.finish_step is not nothing_more


def on_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in containers to a device; what is a leaf stays one."""
    return tree_map(lambda leaf: _on_device(leaf, device) if isinstance(leaf, Tensor) else leaf, value)


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.to(device)
    return (
        moved
        if moved is tensor or not tensor.is_leaf
        else moved.detach().requires_grad_(tensor.requires_grad)
    )


@dataclass(frozen=True)
class Course:
    """How a case is trained.

    Attributes:
        case: what to train.
        program: how an option has it trained.
        backend: Dynamo's, for modes that compile; None to compile nothing.
        ddp_kwargs: from the model to DDP's arguments, for modes that take them.
        steps: how many.
        strategy: for modes of ddpopt's, in place of their own.
        follow: parameters and buffers to start each step from; else each goes on from the one before.
        probe: whether to take one more step that nothing reduces.
        evaluate: whether to run the model after the last step, in evaluation mode and without gradients.
        tamper: called once the model is data-parallel and configured; for faults that are put in by hand.
    """

    case: Case
    program: Program
    backend: Any
    ddp_kwargs: Callable[[nn.Module], Mapping[str, Any]]
    steps: int
    strategy: str | None = None
    follow: Sequence[Named] | None = None
    probe: bool = False
    evaluate: bool = False
    tamper: Callable[[Trainer], None] = lambda _: None


def train(course: Course, mode: Mode, place: Place) -> Record:
    """Train a case for some steps in a mode.

    Returns:
        What happened. A run that fails raises whatever the step raised.
    """
    with mode.running(), contextlib.closing(_Garbage()):
        trainer = Trainer(course.case, place, functools.partial(_make, course, mode, place))
        trainer.record.follow = course.follow
        trainer.record.ignored = frozenset(getattr(trainer.ddp, "parameters_to_ignore", ()))
        course.program.configure(trainer)
        course.tamper(trainer)
        with _watched(trainer, mode), course.program.around(trainer):
            for trainer.step in range(course.program.steps(place, course.steps)):
                if course.follow is not None:
                    trainer.load(course.follow[trainer.step])
                _one_step(trainer, course.program)
        if course.probe:
            _probe(trainer, course.program)
        if course.evaluate:
            _evaluate(trainer)
        return trainer.record


def _make(course: Course, mode: Mode, place: Place) -> Parallel:
    torch.manual_seed(step_seed(0, 0))
    model = course.case.model().to(place.device)
    arguments = course.ddp_kwargs(model) if mode.gives != "nothing" else {}
    backend = course.backend if mode.compiles else None
    return mode.wrap(Setup(model, place.group, backend, arguments, course.strategy))


class _Garbage:
    """What a run leaves in cycles: a DDP module is held by its own hooks, and a reducer by them."""

    def close(self) -> None:
        gc.collect()


@contextlib.contextmanager
def _watched(trainer: Trainer, mode: Mode) -> Iterator[None]:
    """Count graphs and captures, and observe the reducer where there is one."""
    record, ddp = trainer.record, trainer.ddp
    captures = counters["compiled_autograd"]["captures"]
    observation = _observation(ddp) if mode.observable and ddp is not None else None
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
        record.plan = imposed_plan(ddp)


def _observation(ddp: Any) -> Observation | None:
    """Observe a DDP module; not one with an option that leaves no buckets to see."""
    try:
        return observe(ddp)
    except UsageError:
        return None


def _one_step(trainer: Trainer, program: Program) -> None:
    trainer.extras = {}
    _clear_gradients(trainer, keep=program.keeps_gradients)
    program.before_step(trainer)
    trainer.sight.before_step(keep=program.keeps_gradients)
    program.take_step(trainer)
    random = random_state(trainer.place.device)
    trainer.extras |= trainer.sight.after_step() | trainer.sight.settings(trainer.place.device)
    sharing, written = (None, ()) if trainer.ddp is None else trainer.sight.memory(_left(trainer.record))
    gradients, early = trainer.gradients(), set(trainer.extras)
    program.finish_step(trainer)
    final = trainer.gradients() if program.finishes else {}
    _update(trainer.parameters())
    trainer.record.graphs_after.append(len(trainer.compilations.graphs))
    loss = trainer.last_loss
    if loss is None:
        raise RuntimeError("a step ran no forward")
    trainer.record.steps.append(
        Step(
            loss=loss.clone(),
            gradients=gradients,
            state=trainer.state(),
            random=random,
            extras=dict(trainer.extras),
            final=final,
            late=frozenset(trainer.extras.keys() - early),
            sharing=sharing,
            written=written,
        )
    )


def _left(record: Record) -> dict[str, Any]:
    """What the last step left behind, by the names that `Sight` gives it."""
    last = record.steps[-1:]
    gradients = {f"{GRADIENT_OF}{name}": grad for step in last for name, grad in step.gradients.items()}
    return gradients | {name: value for step in last for name, value in step.extras.items()}


def _evaluate(trainer: Trainer) -> None:
    """Run the model twice more on the last inputs, from where eager's last step ended."""
    record = trainer.record
    trainer.load((record.follow or record.starts)[len(record.steps)])
    parts = [part for model in trainer.models for part in model.model.modules()]
    modes = [part.training for part in parts]
    for model in trainer.models:
        model.model.eval()
    extras: dict[str, Any] = {}
    with _without_fast_path():
        for name, without_gradients in (("evaluation", torch.no_grad), ("inference", torch.inference_mode)):
            trainer.extras = {}
            _clear_gradients(trainer, keep=False)
            trainer.sight.before_step(keep=False)
            with without_gradients():
                for index in range(len(trainer.models)):
                    trainer.forward(model=index)
            seen = trainer.extras | trainer.sight.after_step()
            extras |= {f"{name}'s {what}": value for what, value in seen.items()}
    for part, training in zip(parts, modes, strict=True):
        part.training = training
    trained = record.steps[-1].gradients
    state = {name: tensor for name, tensor in trainer.state().items() if name not in trained}
    record.evaluation = Step(None, {}, state, random_state(trainer.place.device), extras)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Have attention compute in evaluation what compiled code computes, and not by a kernel of its own."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def random_state(device: torch.device) -> Tensor:
    """Return the states of the generators that a model on a device draws from: the CPU's, the GPU's own."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.random.get_rng_state(), *own])


def _probe(trainer: Trainer, program: Program) -> None:
    record, ddp = trainer.record, trainer.ddp
    trainer.step = len(record.steps) - 1
    trainer.load(record.starts[trainer.step])
    _clear_gradients(trainer, keep=False)
    broadcasts = ddp.require_forward_param_sync
    with trainer.no_sync():
        program.take_step(trainer)
    ddp.require_forward_param_sync = broadcasts  # of buffers, before the next forward
    record.local = trainer.gradients()


def _clear_gradients(trainer: Trainer, *, keep: bool) -> None:
    for model in trainer.models:
        model.model.zero_grad(set_to_none=not keep)


def _update(parameters: Sequence[nn.Parameter]) -> None:
    """Plain SGD; an optimizer of torch's would refuse to mix dense and sparse gradients in one call."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.copy_(updated(parameter, parameter.grad))


def updated(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """What the optimizer makes of a parameter."""
    return parameter if gradient is None else parameter.add(gradient, alpha=-LEARNING_RATE)
