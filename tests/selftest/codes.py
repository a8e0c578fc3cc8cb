"""Faults in compiled code: gradients, buffers and random numbers that are not what the program computes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpopt.judge.training.option_steps import accumulated_hooks
from ddpopt.judge.training.trainer import Trainer
from tests.selftest.sites import Site, Tamper, after_backward, first, weight

Change = Callable[[Tensor], Tensor]


def on_gradient(change: "Change | type[Stale]") -> Tamper:
    """Give a weight a gradient other than the one that the backward computed."""

    def tamper(trainer: Trainer, site: Site) -> None:
        parameter: Any = weight(trainer)  # torch types its hooks not
        received = change() if isinstance(change, type) else change

        def hook(gradient: Tensor) -> Tensor:
            changed = received(gradient)
            site.mark_unless_equal(changed, gradient)
            return changed

        parameter.register_hook(hook)

    return tamper


class Stale:
    """The gradient of the previous step."""

    def __init__(self) -> None:
        self._last: Tensor | None = None

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the last gradient, and keep this one."""
        last, self._last = self._last, gradient.clone()
        return gradient if last is None else last


def halved(gradient: Tensor) -> Tensor:
    """Rounded to half precision."""
    return gradient.to(torch.bfloat16).to(gradient.dtype)


def holed(gradient: Tensor) -> Tensor:
    """The largest element is lost."""
    changed = gradient.clone()
    changed.view(-1)[gradient.abs().argmax()] = 0
    return changed


def poisoned(gradient: Tensor) -> Tensor:
    """One element is NaN."""
    changed = gradient.clone()
    changed.view(-1)[0] = float("nan")
    return changed


def next_up(gradient: Tensor) -> Tensor:
    """The largest element is off by one unit in the last place."""
    changed = gradient.clone()
    place = gradient.abs().argmax()
    flat = changed.view(-1)
    flat[place] = torch.nextafter(flat[place], torch.tensor(float("inf"), dtype=gradient.dtype))
    return changed


def from_first_rank(trainer: Trainer, site: Site) -> None:
    """Give a weight the gradient that the first rank computed, before anything is reduced."""
    parameter: Any = weight(trainer)  # torch types its hooks not
    group = trainer.place.group

    def hook(gradient: Tensor) -> Tensor:
        theirs = gradient.clone()
        dist.broadcast(theirs, dist.get_global_rank(group, 0), group)
        site.mark_unless_equal(theirs, gradient)
        return theirs

    parameter.register_hook(hook)


def swapped_gradients(trainer: Trainer, site: Site) -> None:
    """Give two weights each other's gradient."""
    one, two = weight(trainer, 0), weight(trainer, 1)

    def swap() -> None:
        if one.grad is not None and two.grad is not None:
            site.mark_unless_equal(one.grad, two.grad)
        one.grad, two.grad = two.grad, one.grad

    after_backward(trainer, swap)


def on_weight(act: Callable[[nn.Parameter], bool]) -> Tamper:
    """Edit a weight that has a gradient, after each backward; the edit returns whether it changed it."""

    def tamper(trainer: Trainer, site: Site) -> None:
        parameter = weight(trainer)

        def acting() -> None:
            if parameter.grad is not None and act(parameter):
                site.mark()

        after_backward(trainer, acting)

    return tamper


def missing_gradient(parameter: nn.Parameter) -> bool:
    """Remove a gradient."""
    parameter.grad = None
    return True


def restrided_gradient(parameter: nn.Parameter) -> bool:
    """Give a weight's gradient the strides of its transpose."""
    assert parameter.grad is not None
    before = parameter.grad.stride()
    parameter.grad = parameter.grad.t().contiguous().t()
    return parameter.grad.stride() != before


@torch.no_grad()
def moved_parameter(parameter: nn.Parameter) -> bool:
    """Move a weight by one unit in the last place."""
    before = parameter.clone()
    parameter.copy_(next_up(parameter))
    return not parameter.equal(before)


def reshaped_gradient(trainer: Trainer, site: Site) -> None:
    """Record a gradient as a vector."""
    gradients = trainer.parallel.gradients

    def flat() -> Any:
        found = gradients()
        matrices = ((name, value) for name, value in found.items() if value is not None and value.dim() == 2)
        name, value = first(matrices, "the gradient of a matrix")
        site.mark()
        return found | {name: value.flatten()}

    trainer.parallel.gradients = flat  # type: ignore[method-assign]  # for this run alone


def stale(what: str, is_stale: Callable[[Tensor], bool]) -> Tamper:
    """Restore the first buffer of a kind after each backward."""

    def tamper(trainer: Trainer, site: Site) -> None:
        buffer = first(filter(is_stale, trainer.parallel.model.buffers()), what)
        before = buffer.clone()

        def put_back() -> None:
            site.mark_unless_equal(before, buffer)
            buffer.copy_(before)

        after_backward(trainer, put_back)

    return tamper


stale_buffer = stale("a buffer of floating-point numbers", Tensor.is_floating_point)
stale_counter = stale("a buffer of integers", lambda buffer: not buffer.is_floating_point())


def replayed_random(trainer: Trainer, site: Site) -> None:
    """Make each forward draw the random numbers of the first."""
    call = trainer.parallel.call
    states: list[Tensor] = []

    def replaying(*args: Any, **kwargs: Any) -> Any:
        states.append(torch.random.get_rng_state())
        site.mark_unless_equal(states[0], states[-1])
        torch.random.set_rng_state(states[0])
        return call(*args, **kwargs)

    trainer.parallel.call = replaying


def counted_twice(trainer: Trainer, site: Site) -> None:
    """Add the gradient of a weight a second time after each backward that is not reduced."""
    parameter = weight(trainer)

    def add() -> None:
        ddp = trainer.ddp
        if parameter.grad is not None and ddp is not None and not ddp.require_backward_grad_sync:
            once = parameter.grad.clone()
            parameter.grad.add_(once)
            site.mark_unless_equal(parameter.grad, once)

    after_backward(trainer, add)


def hook_twice(trainer: Trainer, site: Site) -> None:
    """Make the user's hooks run twice for each gradient, which they count."""
    accumulated_hooks(trainer)

    def look() -> None:
        if any(count == 2 for name, count in trainer.extras.items() if name.startswith("accumulated ")):
            site.mark()

    after_backward(trainer, look)


def recompiling(trainer: Trainer, site: Site) -> None:
    """Forget compiled code after each step."""

    def forget() -> None:
        torch._dynamo.reset_code_caches()
        site.mark()

    after_backward(trainer, forget)
