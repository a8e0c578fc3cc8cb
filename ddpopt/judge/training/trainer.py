"""One model in one mode, as an option's step sees it, and what an option is.

Training adds no collectives, because ranks may take different numbers of steps. Invariant: an option changes
eager DDP and the mode in the same way.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.cases.case import Case, on_device, step_seed
from ddpopt.cases.option_cases import smaller_batch
from ddpopt.judge.engines.engine import Engine, Gives, Named
from ddpopt.judge.training.record import Record, RecordedStep
from ddpopt.judge.training.surroundings import seed_all, seeded
from ddpopt.judge.training.updating import Recipe, Updates, recipe_for
from ddpopt.judge.training.visible import Sight
from ddpopt.observation.compilations import Compilations
from ddpopt.observation.launches import Launch, LaunchMode, words_of


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
        recipe: the optimizer; None for plain SGD without one.
        updates: how its parameters are updated.
        make: makes another model with the same weights.
        other: a second model that an option trains in the same process.
        step: index of the current step.
        record: the record so far.
        extras: values of the step that a script can see (found by `sight`), and values that the option adds.
        compilations: the graphs that Dynamo compiles during the run.
        launches: the collectives of the run, if the engine has no reducer to observe.
        is_training: whether the steps are not yet over.
        sees_all: whether the state of the process, and what shares memory, is part of the record.
        advance: takes a step as the option does, and updates the parameters.
        resized: changes the arguments of each forward, as for a batch of another size; None to leave them.
    """

    def __init__(
        self,
        case: Case,
        place: Place,
        make: Callable[[], Engine],
        recipe: Recipe | None,
        *,
        has_momentum: bool = True,
    ) -> None:
        self.case = case
        self.place = place
        self.make = make
        self.parallel = make()
        self.recipe = recipe_for(recipe, self.parallel, has_momentum=has_momentum)
        self.updates = Updates(self.recipe, self.parallel)
        self.other: Engine | None = None
        self.sight = Sight((case.inputs, case.loss), self.parallel.model)
        self.step = 0
        self.last_loss: Tensor | None = None
        self.extras: dict[str, Any] = {}
        self.compilations = Compilations()
        self.launches: list[Launch] = []
        self.resized: Callable[[Any], Any] | None = None
        self.is_training = True
        self.sees_all = True
        self.advance: Callable[[], object] = _nothing
        # two DDP modules that reduce the same gradients follow no plan
        modules = self.ddp.modules() if self.parallel.planned else ()
        planned = sum(isinstance(module, DistributedDataParallel) for module in modules) == 1
        self.record = Record(self.parallel.state(), planned=planned)

    @property
    def ddp(self) -> Any:
        """The DDP module; None if the mode has none."""
        return self.parallel.ddp

    def loss_of_other(self, part: int) -> Tensor:
        """The loss of the other model on the inputs of a part."""
        assert self.other is not None  # the option made it
        args, kwargs = self.inputs(part)
        return self.case.loss(self.other.call(*args, **kwargs))

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

    def evaluate(self, part: int) -> None:
        """Run a forward in evaluation mode and without gradients, on fewer samples of a part."""
        with self.fewer_samples(), evaluating(self.parallel.model), torch.no_grad():
            self.forward(part)

    @contextlib.contextmanager
    def fewer_samples(self) -> Iterator[None]:
        """In this block each forward takes fewer samples, as at the end of an epoch."""
        resized = self.resized
        self.resized = smaller_batch
        try:
            yield
        finally:
            self.resized = resized

    def seed(self) -> None:
        """Seed the random numbers of a step, or of what is run after the steps."""
        seed_all(step_seed(self.place.rank, self.step))

    def inputs(self, part: int) -> Any:
        """Return the inputs of a part; the random numbers that the step draws do not depend on them."""
        source = self.place.rank + part * self.place.size
        with seeded(step_seed(source, self.step), self.place.device):
            given = self.case.inputs(source, self.step)
        return on_device(given if self.resized is None else self.resized(given), self.place.device)

    def backward(self, loss: Tensor) -> None:
        """Run a backward in the way of the mode."""
        with self.parallel.around_backward():
            self.parallel.backward(loss)

    def sending(self, act: Callable[[], None]) -> tuple[str, ...]:
        """Do something, and return the collectives that it sends, where `launches` has them."""
        before = len(self.launches)
        act()
        return tuple(map(words_of, self.launches[before:]))

    def noting(self, act: Callable[[], object]) -> tuple[str, ...]:
        """Do something after the steps, and return the collectives that it sends."""
        if self.parallel.captures_backward:  # a mode of torch keeps compiled autograd from its work
            act()
            return ()
        launches: list[Launch] = []
        with LaunchMode(launches.append, lambda: None):
            act()
        self.launches += launches
        return tuple(map(words_of, launches))

    def foreign(self) -> tuple[str, ...]:
        """The collectives so far in the default group, if the engine was given another one."""
        default: Any = dist.group.WORLD
        if self.place.group is default or self.parallel.default_group:
            return ()
        own = [launch for launch in self.launches if launch.group == default.group_name]
        return tuple(map(words_of, own))


def _nothing() -> None:
    """No step yet."""


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
        extras: whether the extra steps of `ddpopt.judge.training.moments` are taken after the others.
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
    extras: bool = False
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
        extras: names of the extra steps to take after that.
        has_momentum: whether an optimizer that an engine brings has momentum. It must not where something
            else writes to parameters: they are then compared with those of eager DDP, which has none.
        tamper: called once the model is data-parallel and configured; for injected faults.
        each: takes each step as it ends, instead of the record, which would hold all of them.
    """

    case: Case
    option: Option
    backend: Any
    steps: int
    follow: Sequence[Named] | None = None
    checkpoint: Any = None
    evaluate: bool = False
    extras: Sequence[str] = ()
    has_momentum: bool = True
    tamper: Callable[[Trainer], None] = lambda _: None
    each: Callable[[RecordedStep], None] | None = None


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In this block the model is in evaluation mode; then each module is as it was."""
    with ExitStack() as stack:
        for part in model.modules():
            stack.callback(setattr, part, "training", part.training)
        model.eval()
        # attention must compute what compiled code computes, without its fast-path kernel
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def random_state(device: torch.device) -> Tensor:
    """Return the states of the generators that a model on a device draws from: the CPU's and the GPU's."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.random.get_rng_state(), *own])
