"""Faults in compiled code: gradients, buffers and random numbers that are not what the program computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddpopt.verify.fault_sites import Tamper, after_backward, weight
from ddpopt.verify.training import Trainer

Change = Callable[[Tensor], Tensor]


def on_gradient(change: Change | type[Stale]) -> Tamper:
    """Have a weight receive another gradient than the backward computed."""

    def tamper(trainer: Trainer) -> None:
        parameter: Any = weight(trainer)  # torch types its hooks not
        parameter.register_hook(change() if isinstance(change, type) else change)

    return tamper


class Stale:
    """The gradient of the step before."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the last gradient, and keep this one."""
        last, self._last = self._last, gradient.clone()
        return gradient if last is None else last


def zeroed(gradient: Tensor) -> Tensor:
    """All zeros."""
    return torch.zeros_like(gradient)


def doubled(gradient: Tensor) -> Tensor:
    """Twice the gradient."""
    return gradient * 2


def negated(gradient: Tensor) -> Tensor:
    """The other sign."""
    return -gradient


def transposed(gradient: Tensor) -> Tensor:
    """Rows for columns."""
    return gradient.t().contiguous()


def halved(gradient: Tensor) -> Tensor:
    """Rounded to half precision."""
    return gradient.to(torch.bfloat16).to(gradient.dtype)


def rolled(gradient: Tensor) -> Tensor:
    """Each row one place further down."""
    return gradient.roll(1, 0)


def holed(gradient: Tensor) -> Tensor:
    """The largest element lost."""
    changed = gradient.clone()
    changed.view(-1)[gradient.abs().argmax()] = 0
    return changed


def poisoned(gradient: Tensor) -> Tensor:
    """One element not a number."""
    changed = gradient.clone()
    changed.view(-1)[0] = float("nan")
    return changed


def next_up(gradient: Tensor) -> Tensor:
    """The largest element one unit in the last place further."""
    changed = gradient.clone()
    place = gradient.abs().argmax()
    flat = changed.view(-1)
    flat[place] = torch.nextafter(flat[place], torch.tensor(float("inf"), dtype=gradient.dtype))
    return changed


def swapped_gradients(trainer: Trainer) -> None:
    """Give two weights each other's gradient."""
    one, two = weight(trainer, 0), weight(trainer, 1)

    def swap() -> None:
        one.grad, two.grad = two.grad, one.grad

    after_backward(trainer, swap)


def missing_gradient(trainer: Trainer) -> None:
    """Take a gradient away."""
    parameter = weight(trainer)

    def take() -> None:
        parameter.grad = None

    after_backward(trainer, take)


def reshaped_gradient(trainer: Trainer) -> None:
    """Record a gradient as a vector."""
    gradients = trainer.parallel.gradients

    def flat() -> Any:
        found = gradients()
        name = next(name for name, value in found.items() if value is not None and value.dim() == 2)
        value = found[name]
        return found | {name: None if value is None else value.flatten()}

    trainer.parallel.gradients = flat  # type: ignore[method-assign]  # for this run alone


def restrided_gradient(trainer: Trainer) -> None:
    """Give a weight's gradient the strides of its transpose."""
    parameter = weight(trainer)

    def restride() -> None:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.t().contiguous().t()

    after_backward(trainer, restride)


def moved_parameter(trainer: Trainer) -> None:
    """Move a weight by one unit in the last place."""
    parameter = weight(trainer)

    def move() -> None:
        with torch.no_grad():
            parameter.copy_(next_up(parameter))

    after_backward(trainer, move)


def stale_buffer(trainer: Trainer) -> None:
    """Put a floating-point buffer back after each backward."""
    _put_back(trainer, next(b for b in trainer.parallel.model.buffers() if b.is_floating_point()))


def stale_counter(trainer: Trainer) -> None:
    """Put a buffer of integers back after each backward."""
    _put_back(trainer, next(b for b in trainer.parallel.model.buffers() if not b.is_floating_point()))


def _put_back(trainer: Trainer, buffer: Tensor) -> None:
    before = buffer.clone()

    def put_back() -> None:
        buffer.copy_(before)

    after_backward(trainer, put_back)


def replayed_random(trainer: Trainer) -> None:
    """Have each forward draw the random numbers of the first."""
    state = torch.random.get_rng_state()
    trainer.parallel.model.register_forward_pre_hook(lambda *_: torch.random.set_rng_state(state))


def counted_twice(trainer: Trainer) -> None:
    """Add the gradient of a weight once more after each backward that is not reduced."""
    parameter = weight(trainer)

    def add() -> None:
        ddp = trainer.ddp
        if parameter.grad is not None and ddp is not None and not ddp.require_backward_grad_sync:
            parameter.grad.add_(parameter.grad.clone())

    after_backward(trainer, add)


def hook_twice(trainer: Trainer) -> None:
    """Have a hook of the user's counted once more."""

    def count() -> None:
        name = next(name for name in trainer.extras if name.startswith("accumulated "))
        trainer.extras[name] += 1

    after_backward(trainer, count)


def recompiling(trainer: Trainer) -> None:
    """Forget compiled code after each step."""
    after_backward(trainer, lambda: torch._dynamo.reset_code_caches())
