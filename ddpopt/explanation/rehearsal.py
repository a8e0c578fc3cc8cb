"""Run one training step of a model on fake tensors, to find the order in which its gradients complete.

Autograd's engine determines that order: by the graph that forward recorded, and by how it breaks ties.
The engine works on fake tensors as on real ones, so the order is observed, not modeled.

Invariant: no weight is copied or changed, no hook is left, and the default generators are unchanged.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpopt.dynamo.capture import fake_copy, private_dynamo
from ddpopt.graph.nodes import tensors_in
from ddpopt.planning.bucket_rule import ParamSpec

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class RehearsedStep:
    """One step to rehearse: a model, the arguments of its forward, and the loss to differentiate.

    Attributes:
        model: the module inside DDP; its parameters may be real, fake or on the meta device.
        args: positional arguments of its forward.
        kwargs: keyword arguments of its forward.
        loss: from the model's output to a scalar.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss


def sum_of_squares(output: object) -> Tensor:
    """A loss over every tensor in an output that requires grad."""
    squares = [leaf.abs().double().square().sum() for leaf in tensors_in(output) if leaf.requires_grad]
    return torch.stack(squares).sum()


@dataclass(frozen=True)
class Rehearsal:
    """A step with fake tensors instead of real ones.

    Attributes:
        step: the fake copy; run it only once, because it may change its own buffers.
        params: every trainable parameter of the copy, by its name in the original.
        specs: those that DDP reduces, by ``id`` of the parameter, in the order of the reducer's list.
    """

    step: RehearsedStep
    params: dict[str, Tensor]
    specs: dict[int, ParamSpec]

    @classmethod
    @contextlib.contextmanager
    def of(cls, step: RehearsedStep, specs: Sequence[ParamSpec]) -> "Iterator[Rehearsal]":
        """Copy a step, and enter its fake mode and a Dynamo context without the caller's settings.

        Args:
            step: the real step.
            specs: the parameters that DDP reduces, in the order of the reducer's list.

        Yields:
            The rehearsal.
        """
        mode, (model, args, kwargs), copies = fake_copy(step.model, step.args, step.kwargs)
        by_id = {id(copies[spec.name]): spec for spec in specs}
        params = {name: copies[name] for name, p in step.model.named_parameters() if p.requires_grad}
        with torch.random.fork_rng(devices=()), mode, private_dynamo(), torch.enable_grad():
            yield cls(RehearsedStep(model, args, kwargs, step.loss), params, by_id)

    def ready_order(self, forward: Callable[[RehearsedStep], Any]) -> tuple[str, ...]:
        """Run forward and backward, and record the order in which gradients complete.

        Args:
            forward: calls the step's model, perhaps compiled, and returns its output.

        Returns:
            Names of the parameters that DDP reduces and that got a gradient, in ready order.
        """
        order: list[str] = []
        # a user's own fake parameters are not copied, so their gradients must be restored
        before = {name: param.grad for name, param in self.params.items()}
        reduced = [param for param in self.params.values() if id(param) in self.specs]
        hooks = [_register(param, partial(_note, order, self.specs[id(param)].name)) for param in reduced]
        try:
            self.step.loss(forward(self.step)).backward()  # type: ignore[no-untyped-call]  # of torch
        finally:
            for hook in hooks:
                hook.remove()
            for name, param in self.params.items():
                param.grad = before[name]
        return tuple(order)


def _register(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # of torch


def _note(order: list[str], name: str, _: Tensor) -> None:
    order.append(name)


def call(step: RehearsedStep) -> Any:
    """Call a step's model without compiling it; a `forward` for :meth:`Rehearsal.ready_order`."""
    return step.model(*step.args, **step.kwargs)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore torch's generators, of the CPU and of each GPU in use, after the block."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # of torch
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if in_use else ()):
        yield
