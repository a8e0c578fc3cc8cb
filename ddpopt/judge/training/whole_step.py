"""An option's step in a mode that runs it as one graph: forwards, losses and backwards together.

The option's function runs twice: first to learn which parts of the batch it takes, in which order; then as
the function that ``ddpopt.train_step`` captures, on these parts.

Invariant: the parts are those of a step that is not captured, and so are the random numbers that it draws.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

Step = Callable[[Any], None]
WHOLE = "step/"
"""What the ids of graphs of whole steps begin with."""


class Part(NamedTuple):
    """A forward of a step.

    Attributes:
        number: the part of the batch.
        evaluates: whether it is an evaluation, on fewer samples and without gradients.
    """

    number: int
    evaluates: bool = False


class _Scout:
    """Notes which parts a step takes, and which of them the other model takes."""

    def __init__(self, trainer: Any) -> None:
        self.place = trainer.place
        self.updates = trainer.updates
        self.step = trainer.step
        self.other = trainer.other
        self.parts: list[Part] = []
        self.parts_of_other: list[Part] = []
        self.parallel = SimpleNamespace(no_sync=contextlib.nullcontext)

    def loss(self, part: int = 0) -> Tensor:
        """A number in place of a loss."""
        self.parts.append(Part(part))
        return torch.zeros((), requires_grad=True)

    def loss_of_other(self, part: int) -> Tensor:
        """The same for the other model."""
        self.parts_of_other.append(Part(part))
        return torch.zeros((), requires_grad=True)

    def evaluate(self, part: int) -> None:
        """The same for an evaluation."""
        self.parts.append(Part(part, evaluates=True))

    def backward(self, loss: Tensor) -> None:
        """Nothing."""


class _Captured:
    """What a step sees of its trainer while it is captured."""

    def __init__(self, trainer: Any, module: Any, other: Any, batches: Mapping[Part, Any]) -> None:
        self.case = trainer.case
        self.place = trainer.place
        self.updates = trainer.updates
        self.step = trainer.step
        self.other = other
        self.parallel = module if isinstance(module, DistributedDataParallel) else _Unwrapped(module)
        self.batches = batches
        self.outputs: list[Any] = []
        self.values: list[Any] = []
        self.last: Any = None

    def loss(self, part: int = 0) -> Tensor:
        """The loss of a part."""
        loss: Tensor = self.case.loss(self._forward(Part(part)))
        self.last = loss.detach()
        return loss

    def _forward(self, part: Part) -> Any:
        args, kwargs = self.batches[part]
        self.outputs.append(self.parallel(*args, **kwargs))
        self.values.append(_mapped(_copied, self.outputs[-1]))  # a later forward may write to outputs
        return self.outputs[-1]

    def evaluate(self, part: int) -> None:
        """A forward in evaluation mode."""
        modules = [*self.parallel.modules()]
        trained = [module.training for module in modules]
        self.parallel.eval()
        with torch.no_grad():
            self._forward(Part(part, evaluates=True))
        for module, training in zip(modules, trained, strict=True):
            module.training = training

    def loss_of_other(self, part: int) -> Tensor:
        """The loss of the other model."""
        args, kwargs = self.batches[Part(part)]
        loss: Tensor = self.case.loss(self.other(*args, **kwargs))
        return loss

    def backward(self, loss: Tensor) -> None:
        """A plain backward."""
        torch.autograd.backward(loss)


class _Unwrapped:
    """A module without DDP, as steps see it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def modules(self) -> Iterator[nn.Module]:
        """The module and those in it."""
        return self.module.modules()

    def eval(self) -> None:
        """Put the module into evaluation mode."""
        self.module.eval()

    def no_sync(self) -> contextlib.nullcontext[None]:
        """Nothing: a step sends what its backward passes add up."""
        return contextlib.nullcontext()


def _called(engine: Any) -> Any:
    """What steps of an engine call: its DDP module, or the model."""
    return engine.model if engine.ddp is None else engine.ddp


def whole_step(
    trainer: Any, take_step: Step, decorate: Callable[[Any], Any], *, captures_update: bool = False
) -> Callable[[], None]:
    """A function that takes an option's step as one graph.

    Args:
        trainer: the `ddpopt.judge.training.trainer.Trainer`.
        take_step: the option's step.
        decorate: makes one graph of a function.
        captures_update: whether the optimizer is a part of the graph.

    Returns:
        The function, for all steps of a run.
    """

    def step(module: Any, other: Any, optimizer: Any, batches: Mapping[Part, Any]) -> Any:
        captured = _Captured(trainer, module, other, batches)
        take_step(captured)
        if captures_update:
            optimizer.step()
        computed = [_mapped(_is_computed, each) for each in captured.outputs]
        outputs = [_mapped(_detached, each) for each in captured.outputs]
        return outputs, captured.values, computed, captured.last

    run: Any = decorate(step)

    def take() -> None:
        scout = _Scout(trainer)
        take_step(scout)
        batches = {part: _inputs(trainer, part) for part in (*scout.parts, *scout.parts_of_other)}
        other = None if trainer.other is None else _called(trainer.other)
        for part in scout.parts:
            trainer.sight.calls(*batches[part])
        outputs, values, computed, trainer.last_loss = run(
            _called(trainer.parallel), other, trainer.updates.optimizer, batches
        )
        known = sum(each.startswith(WHOLE) for each in trainer.compilations.graphs)
        trainer.compilations.graphs.extend(f"{WHOLE}{place}" for place in range(known, len(run.graphs)))
        for forward, (output, of_graph, value) in enumerate(zip(outputs, computed, values, strict=True), 1):
            trainer.extras |= trainer.sight.returns(_mapped(_attached, output, of_graph), forward, value)

    return take


def _inputs(trainer: Any, part: Part) -> Any:
    with trainer.fewer_samples() if part.evaluates else contextlib.nullcontext():
        return trainer.inputs(part.number)


def _mapped(function: Callable[..., Any], output: Any, *others: Any) -> Any:
    """`tree_map`, also over the fields of a dataclass, which `tree_map` takes for a leaf."""
    if not is_dataclass(output):
        return tree_map(function, output, *others)
    found = {
        name: tree_map(function, value, *(vars(each)[name] for each in others))
        for name, value in vars(output).items()
    }
    kind: Any = type(output)
    return kind(**found)


def _detached(value: Any) -> Any:
    return value.detach() if _is_computed(value) else value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and not value.is_leaf


def _attached(value: Any, is_computed: bool) -> Any:
    """An output with the autograd state that it had while it was captured."""
    return value.detach().requires_grad_().view_as(value) if is_computed else value
