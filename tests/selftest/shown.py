"""Faults in what a training script sees besides its parameters' gradients, and the case that shows all of it.

Invariant: parameters, their gradients and the loss are right in each of these faults, so that who looks at
those alone finds nothing; but where a gradient lies in the wrong memory, its numbers are right too.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddpopt.cases.case import Call, Case, mean_square, step_seed
from ddpopt.judge.training.trainer import Trainer
from tests.selftest.codes import Change
from tests.selftest.sites import Site, Tamper, after_backward

WIDTH, ROWS = 8, 4


class Shown(nn.Module):
    """Has several outputs, an ignored parameter, a hook that records its argument, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kept: list[Tensor | None] = []
        self.last: Tensor | None = None
        self._ddp_params_and_buffers_to_ignore = ["scale"]
        hooked: Any = self.first.weight  # torch types its hooks not
        hooked.register_hook(self._keep)

    def _keep(self, gradient: Tensor) -> None:
        self.kept[:] = [gradient.clone()]

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        """Return what the loss reads, a value that it does not, a copy of an input, a number, an input."""
        x = torch.tanh(self.first(left + right)) + self.one + self.other
        self.last = x.detach() + 1
        read = self.second(self.norm(x)) * self.scale
        return read, x.detach() * 2, left.detach().clone(), 3, right.detach()


def shown_case() -> Case:
    """The case, with a tensor outside DDP that its loss reads."""
    outside = torch.linspace(-1, 1, WIDTH).requires_grad_()
    return Case(
        "shown",
        Shown,
        _inputs,
        "all that a training script can see",
        loss=lambda output: mean_square(output[0] * outside),
        ddp_kwargs={"bucket_cap_mb": 0.0003},
    )


def _inputs(rank: int, step: int) -> Call:
    generator = torch.Generator().manual_seed(step_seed(rank, step))
    left, right = torch.randn(2, ROWS, WIDTH, generator=generator)
    return (left.clone().requires_grad_(), right.clone().requires_grad_()), {}


# -------------------------------------------------------------------------------------- what a script gets

Tell = Callable[[Trainer], bool]


def always(trainer: Trainer) -> bool:
    """In each step."""
    return True


def in_last_step(trainer: Trainer) -> bool:
    """From the third step on."""
    return trainer.step > 1


def in_evaluation(trainer: Trainer) -> bool:
    """Where no gradients are computed."""
    return not torch.is_grad_enabled()


def in_no_grad(trainer: Trainer) -> bool:
    """In the evaluations that come before the one under inference mode."""
    return in_evaluation(trainer) and not torch.is_inference_mode_enabled()


def on_output(place: int, change: Callable[[Any], Any], when: Tell = always) -> Tamper:
    """Make the model return something else in one place."""

    def tamper(trainer: Trainer, site: Site) -> None:
        call = trainer.parallel.call

        def changed(*args: Any) -> Any:
            output = list(call(*args))
            if when(trainer):
                output[place] = change(output[place])
                site.mark()
            return tuple(output)

        trainer.parallel.call = changed

    return tamper


class Kept:
    """Returns copies of the first value it received, or places every value in the memory of the first."""

    def __init__(self, *, copies: bool) -> None:
        self._first: Tensor | None = None
        self._copies = copies

    def __call__(self, value: Tensor) -> Tensor:
        """Return the first value, or its memory under another name."""
        if self._first is None:
            self._first = value.clone()
        if self._copies:
            return self._first.clone()
        if value.shape != self._first.shape:  # of a smaller batch
            return value
        return self._first.copy_(value).view(value.shape)


def given(trainer: Trainer, act: Callable[[Tensor, Tensor], object]) -> None:
    """Do something with the inputs before each forward."""
    call = trainer.parallel.call

    def seeing(left: Tensor, right: Tensor) -> Any:
        act(left, right)
        return call(left, right)

    trainer.parallel.call = seeing


def on_input_gradient(change: Change, when: Tell = always) -> Tamper:
    """Give an input a different gradient."""

    def tamper(trainer: Trainer, site: Site) -> None:
        def hook(gradient: Tensor) -> Tensor:
            changed = change(gradient) if when(trainer) else gradient
            site.mark_unless_equal(changed, gradient)
            return changed

        given(trainer, lambda left, _: _hook(left, hook))

    return tamper


def _hook(tensor: Any, hook: Change) -> object:
    return tensor.register_hook(hook)  # torch types its hooks not


def during_call(act: Callable[[Trainer], Any], when: Tell = always) -> Tamper:
    """Do something before each forward."""

    def tamper(trainer: Trainer, site: Site) -> None:
        def acting(*_: Tensor) -> None:
            if when(trainer):
                act(trainer)
                site.mark()

        given(trainer, acting)

    return tamper


def on_inputs(act: Callable[[Tensor, Tensor], Any]) -> Tamper:
    """Do something with the inputs after each backward."""

    def tamper(trainer: Trainer, site: Site) -> None:
        latest: list[Tensor] = []
        given(trainer, lambda *inputs: latest.__setitem__(slice(None), inputs))
        on_model(lambda _: act(*latest))(trainer, site)

    return tamper


def outside(trainer: Trainer) -> Any:
    """The tensor outside DDP that the case's loss reads."""
    loss: Any = trainer.case.loss
    return loss.__closure__[0].cell_contents


def on_model(act: Callable[[Any], Any], find: Callable[[Trainer], Any] | None = None) -> Tamper:
    """Do something after each backward with the model, or with what is found."""

    def tamper(trainer: Trainer, site: Site) -> None:
        def acting() -> None:
            act(trainer.parallel.model if find is None else find(trainer))
            site.mark()

        after_backward(trainer, acting)

    return tamper


on_outside = partial(on_model, find=outside)


def scaled(value: Any, by: float = 1.01) -> Any:
    """A little larger."""
    return value * by


def of_inference(tensor: Tensor) -> Tensor:
    """A copy that autograd never uses."""
    with torch.inference_mode():
        return tensor.clone()


def larger_gradient(tensor: Tensor) -> None:
    """Scale a gradient in place."""
    if tensor.grad is not None:
        tensor.grad.mul_(1.01)


def gradients_in_one_memory(trainer: Trainer, site: Site) -> None:
    """Keep the gradients of all steps in the same memory."""
    memory = Kept(copies=False)

    def move(model: Any) -> None:
        model.second.weight.grad = memory(model.second.weight.grad)

    on_model(move)(trainer, site)


def share_gradients(model: Any) -> None:
    """Make two parameters whose gradients are equal share one gradient."""
    model.other.grad = model.one.grad.view(-1)


def keep(change: Callable[[Tensor], Any], model: Any) -> None:
    """Change what the hook recorded."""
    model.kept[:] = [change(gradient) for gradient in model.kept]


FAULTS: dict[str, tuple[str, Tamper]] = {
    # in what the model returns
    "an output that the loss does not read": ("L0", on_output(1, scaled)),
    "an output in the last step": ("L0", on_output(1, scaled, in_last_step)),
    "a row of an output": ("L0", on_output(1, lambda t: torch.cat([t[:1] * 2, t[1:]]))),
    "the dtype of an output": ("L3", on_output(1, Tensor.double)),
    "the strides of an output": ("L3", on_output(1, lambda t: t.t().contiguous().t())),
    "whether an output needs gradients": ("L3", on_output(1, Tensor.requires_grad_)),
    "a number among the outputs": ("L0", on_output(3, scaled)),
    "None for an output": ("L3", on_output(1, lambda _: None)),
    "an output is another one": ("L3", on_output(0, lambda t: t.view(t.shape).detach())),
    "outputs of all steps in one memory": ("L3", on_output(1, Kept(copies=False))),
    "an output that no longer shares an input's memory": ("L3", on_output(4, Tensor.clone)),
    "an output made in inference mode": ("L3", on_output(1, of_inference)),
    "the type of a number among the outputs": ("L3", on_output(3, float)),
    "inference mode": ("L0", on_output(0, scaled, lambda _: torch.is_inference_mode_enabled())),
    "evaluation": ("L0", on_output(0, scaled, in_evaluation)),
    "a small error in evaluation": ("L0", on_output(0, partial(scaled, by=1 + 1e-6), in_evaluation)),
    # in gradients that are no parameter's of DDP's, or in whose memory they lie
    "the gradient of an input": ("L0", on_input_gradient(scaled)),
    "the gradient of an input, zero": ("L0", on_input_gradient(torch.zeros_like)),
    "the gradient of an input, in another order": ("L0", on_input_gradient(lambda g: g.flip(0))),
    "the gradient of an input in the last step": ("L0", on_input_gradient(scaled, in_last_step)),
    "the gradient of an input, missing": ("L3", on_inputs(lambda left, _: setattr(left, "grad", None))),
    "a gradient that requires gradients": ("L3", on_model(lambda m: m.second.weight.grad.requires_grad_())),
    "gradients of two inputs in one memory": ("L3", on_inputs(lambda a, b: setattr(b, "grad", a.grad))),
    "gradients of two parameters in one memory": ("L3", on_model(share_gradients)),
    "gradients of all steps in one memory": ("L3", gradients_in_one_memory),
    "the gradient of an ignored parameter": ("L0", on_model(lambda m: larger_gradient(m.scale))),
    "the gradient of a tensor outside DDP": ("L0", on_outside(larger_gradient)),
    "the gradient outside DDP, missing": ("L3", on_outside(lambda t: setattr(t, "grad", None))),
    # in what else a script can see
    "what a hook saw": ("L0", on_model(partial(keep, scaled))),
    "a hook saw None": ("L3", on_model(partial(keep, lambda _: None))),
    "a hook did not run": ("L3", on_model(lambda model: model.kept.clear())),
    "an attribute of a module": ("L0", on_model(lambda m: setattr(m, "last", m.last * 2))),
    "a write to an input": ("L0", on_inputs(lambda left, _: left.detach().mul_(1.01))),
    "an extra parameter": (
        "L3",
        on_model(lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1), False))),
    ),
    "a draw of Python's random numbers": ("L3", during_call(lambda _: random.random())),
    "a draw of NumPy's random numbers": ("L3", during_call(lambda _: np.random.rand())),
    "evaluations in one memory": ("L3", on_output(1, Kept(copies=False), in_evaluation)),
    "an evaluation with the weights of the first": ("L0", on_output(0, Kept(copies=True), in_evaluation)),
    "gradients after an evaluation": (
        "L3",
        during_call(lambda t: setattr(t.parallel.model.one, "grad", torch.zeros(WIDTH)), in_evaluation),
    ),
    "a draw of random numbers in evaluation": ("L3", during_call(lambda _: torch.rand(1), in_no_grad)),
    "a buffer in evaluation": (
        "L0",
        during_call(lambda t: next(t.parallel.model.buffers()).add_(1), in_no_grad),
    ),
    "whether a model trains": ("L3", on_model(lambda model: model.norm.eval())),
}
"""Each fault: the level that has to find it, and how it is injected."""
