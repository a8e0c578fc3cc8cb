"""How parameters are updated: by plain SGD, or by an optimizer of torch with what a training puts around it.

Invariant: `repeated` computes what the optimizer made of the gradients of a run, bit by bit, if nothing else
wrote to the parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddpopt.errors import UnsupportedError
from ddpopt.judge.compare import dense
from ddpopt.judge.engines.engine import Engine, Named
from ddpopt.judge.training.record import Record, optimizer_state

LEARNING_RATE = 0.05
"""For plain SGD: large enough that a stale gradient or a missed update shows one step later."""
MOMENTUM = 0.5
DECAY = 0.9
"""Of moving averages: small enough that an error in them shows after a few steps."""
SCALE = 1024.0
"""Of the loss in the first step; it doubles after each."""


@dataclass(frozen=True)
class Recipe:
    """An optimizer, and what a training puts around it.

    Attributes:
        kind: the class of the optimizer.
        settings: its arguments besides the parameters.
        schedule: makes a scheduler, which is stepped after each step.
        scales: whether a ``GradScaler`` scales the loss, and leaves out steps whose gradients are not finite.
        averages: whether an exponential moving average of the parameters is kept.
    """

    kind: type[Optimizer]
    settings: Mapping[str, Any] = field(default_factory=dict)
    schedule: Callable[[Any], Any] | None = None
    scales: bool = False
    averages: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether a graph that contains the optimizer may compute what eager does, bit for bit.

        In a graph Adam computes its bias correction in float32, where eager has Python's numbers; its fused
        kernel is the same in both.
        """
        return self.kind is SGD or bool(self.settings.get("fused"))


def recipe_for(recipe: Recipe | None, engine: Engine, *, has_momentum: bool = True) -> Recipe | None:
    """How an engine is trained under an option with this recipe.

    An engine that brings an optimizer, and no `step`, always trains with it: with momentum, so that its state
    matters. A step in one graph has an optimizer in the graph.

    Args:
        recipe: the option's.
        engine: the engine.
        has_momentum: as in `ddpopt.judge.training.trainer.Course`.
    """
    if recipe is not None or engine.replaces("step"):
        return recipe
    if engine.replaces("optimizer"):
        return Recipe(SGD, {"lr": LEARNING_RATE, "momentum": MOMENTUM if has_momentum else 0.0})
    return None if engine.whole is None else Recipe(SGD, {"lr": LEARNING_RATE})


class Updates:
    """The updates of one run.

    Args:
        recipe: how to update; None for plain SGD without an optimizer, as the engine's `step` does it.
        engine: the engine, with its model.

    Attributes:
        optimizer: the optimizer, if there is one.
        scaler: the ``GradScaler``, if there is one.
        averages: the moving averages of the parameters, in their order; empty if none are kept.
        factor: of the scaled loss, by which it overflows; a tensor (), so that all steps run the same graphs.

    Raises:
        UnsupportedError: the engine has updates of its own.
    """

    def __init__(self, recipe: Recipe | None, engine: Engine) -> None:
        self._engine = engine
        self.optimizer: Any = None
        self.scaler: Any = None
        self.averages: list[Tensor] = []
        self.factor = torch.ones(())
        self._schedule: Any = None
        if recipe is None:
            return
        if recipe.averages and not engine.is_sharded:
            self.averages = [each.detach().clone() for each in engine.model.parameters()]
        if engine.replaces("step") and not engine.replaces("optimizer"):
            raise UnsupportedError(f"{engine.name} has a step() of its own, but no optimizer()")
        self.optimizer = engine.optimizer(recipe.kind, **recipe.settings)
        if recipe.schedule is not None:
            if not isinstance(self.optimizer, Optimizer):
                got = type(self.optimizer).__name__
                raise UnsupportedError(f"{engine.name}: a scheduler needs a torch.optim.Optimizer, got {got}")
            self._schedule = recipe.schedule(self.optimizer)
        if recipe.scales:
            kind = next(engine.model.parameters()).device.type
            self.scaler = torch.amp.GradScaler(kind, SCALE, growth_interval=1)

    def step(self) -> None:
        """Update the parameters."""
        if self.optimizer is None:
            self._engine.step(LEARNING_RATE)
        elif self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.follow()

    def follow(self) -> None:
        """Set the learning rate of the next step, if there is a scheduler, and update the averages."""
        if self._schedule is not None:
            self._schedule.step()
        if self.averages:
            parameters = [each.detach() for each in self._engine.model.parameters()]
            average = get_ema_multi_avg_fn(DECAY)  # type: ignore[no-untyped-call]  # of torch
            average(self.averages, parameters, None)

    def averaged(self, named: Sequence[tuple[str, nn.Parameter]]) -> Named:
        """Copies of the averages by the names of their parameters; empty if none are kept."""
        names = [name for name, _ in named]
        return {f"average of {name}": each.clone() for name, each in zip(names, self.averages, strict=False)}

    def state(self) -> list[Any]:
        """What a checkpoint has of the updates."""
        return [part and part.state_dict() for part in self._parts]

    def load(self, state: list[Any]) -> None:
        """Go on from a checkpoint."""
        for part, saved in zip(self._parts, state, strict=True):
            if part is not None:
                part.load_state_dict(saved)

    @property
    def _parts(self) -> tuple[Any, ...]:
        return self.optimizer, self.scaler, self._schedule


@dataclass(frozen=True)
class Updated:
    """What an update of the parameters makes.

    Attributes:
        parameters: the parameters after the step, by name.
        state: the optimizer's state after the step, by its name and the parameter's.
    """

    parameters: Named
    state: Named


def repeated(record: Record, moved: Callable[[Tensor], Tensor] = torch.clone) -> list[Updated]:
    """What the gradients that a run took make of its parameters in each step.

    A gradient without its parameter's shape and dtype counts as missing.

    Args:
        record: the run.
        moved: gives the tensor to compute with instead of a parameter before a step, or of a gradient.
    """
    recipe: Recipe | None = record.recipe
    names = [name for name in record.steps[0].gradients if name in record.start] if record.steps else []
    engine = Engine()
    engine.model = nn.ParameterList(moved(record.start[name]) for name in names)
    parameters = [*engine.model.parameters()]
    scales = recipe is not None and recipe.scales
    updates = Updates(replace(recipe, scales=False) if recipe else None, engine)
    found = []
    for start, step in zip(record.starts, record.steps, strict=False):
        for name, parameter in zip(names, parameters, strict=True):
            data = start[name]
            gradient = step.taken.get(name)
            if gradient is not None and (gradient.shape, gradient.dtype) != (data.shape, data.dtype):
                gradient = None
            parameter.data = moved(data)
            parameter.grad = None if gradient is None else moved(gradient)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not scales or all(bool(dense(gradient).isfinite().all()) for gradient in gradients):
            updates.step()
        named = [*zip(names, parameters, strict=True)]
        state = {} if updates.optimizer is None else optimizer_state(updates.optimizer, named)
        state |= updates.averaged(named)
        found.append(Updated({name: p.detach().clone() for name, p in named}, state))
    return found
