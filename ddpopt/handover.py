"""Hand gradients to DDP from inside a compiled backward.

A graph that takes part has, for each parameter, a call of `lend` between the parameter and its readers. Its
backward is the operator ``ddpopt::hand_over``, which autograd runs as soon as the gradient is complete, and
which stands at that place in the compiled backward too. What the graph gets in the parameter's place is
detached from it. Gradients that are not handed over leave through a gate, an autograd node around the
compiled code whose edges lead to the parameters:

    parameter ──────────── (detached) ──────────► lend ──► readers
        └──► gate ──► token (an empty tensor) ──────┘

Whether a gradient is handed over is decided in each backward, never when the graph is compiled. All of this
must hold; else the gradient waits until the compiled backward is over and takes the usual way:

- the engine will accumulate into this parameter in this backward (not so under ``torch.autograd.grad``);
- no other edge of the backward leads to the parameter, so that the gradient is all of it (not so for a
  weight that the loss reads too, after a graph break, or with two forwards before one backward);
- nobody has hooked the parameter; a user's hook runs once, at its usual time;
- the backward creates no graph of its own, and DDP's forward has led here.

Invariant: each gradient reaches its parameter exactly once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ready_hooks import ready_hooks
from ddpopt.running_backward import NO_TASK, running_backward, task_id, will_run

__all__ = ["Call", "hand_over", "lend"]


class Call:
    """One forward of a compiled graph, and what becomes of its gradients.

    Args:
        ddp: the DDP module whose forward is running, if any.
        parameters: those that the graph was lent, in the order of their slots.

    Attributes:
        ticket: tells the compiled backward which call it belongs to; an int64 scalar on the CPU.
    """

    def __init__(self, ddp: DistributedDataParallel | None, parameters: Sequence[Tensor]) -> None:
        self.ticket = torch.tensor(next(_numbers))
        self._hooks = None if ddp is None else ready_hooks(ddp)
        self._parameters = tuple(parameters)
        self._kept: dict[int, Tensor] = {}
        self._task = NO_TASK
        self._places: tuple[int | None, ...] = ()
        _calls[int(self.ticket)] = self

    def open_gate(self) -> tuple[Tensor, ...]:
        """Tokens for `lend`, one for each parameter; an empty tensor of the parameter's type each."""
        tokens: tuple[Tensor, ...] = _Gate.apply(self, *self._parameters)  # type: ignore[no-untyped-call]
        return tokens

    def receive(self, slot: int, gradient: Tensor) -> None:
        """The gradient of a parameter is complete: hand it over, or keep it for the gate."""
        task = task_id()
        if task != self._task:
            self._decide()
            self._task = task
        place = self._places[slot]
        if place is not None and self._hooks is not None:
            self._hooks.hand_over(place, gradient)
        else:
            self._kept[slot] = gradient.clone()  # compiled code may reuse this memory for its next value

    def claim(self, slot: int) -> Tensor | None:
        """A gradient that was kept; None where it was handed over, or where there is none."""
        return self._kept.pop(slot, None)

    def _decide(self) -> None:
        """Find out which gradients may be handed over in the backward that is running now."""
        self._places = (None,) * len(self._parameters)
        hooks = self._hooks
        if hooks is None or not hooks.take_over():
            return
        backward = running_backward()
        if backward is None or backward.creates_graph:
            return
        places = (hooks.places.get(id(parameter)) for parameter in self._parameters)
        self._places = tuple(
            place
            if place is not None
            and not _is_hooked(parameter)
            and backward.leaf_edges.get(id(hooks.leaves[place])) == 1
            and will_run(hooks.leaves[place])
            else None
            for parameter, place in zip(self._parameters, places, strict=True)
        )


_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()


def _is_hooked(parameter: Any) -> bool:
    """Whether a user's hook is to run when this parameter gets its gradient."""
    return bool(
        parameter._backward_hooks
        or parameter._post_accumulate_grad_hooks
        or hasattr(parameter, "_in_backward_optimizers")
    )


class _Gate(torch.autograd.Function):
    """Takes to the parameters what was not handed over."""

    @staticmethod
    def forward(ctx: Any, call: Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(parameter.new_empty(0) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        gradients = [call.claim(slot) for slot in range(len(tokens))]
        if torch.is_grad_enabled():
            # create_graph: whoever differentiates again is to meet the compiled backward, which says that it
            # cannot be
            gradients = [
                g if g is None or token is None else g + token.sum()
                for g, token in zip(gradients, tokens, strict=True)
            ]
        return (None, *gradients)


class _Lend(torch.autograd.Function):
    """The identity on a parameter, whose backward hands the gradient over."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, _: Tensor, ticket: Tensor, slot: int) -> Tensor:
        ctx.save_for_backward(ticket)
        ctx.slot = slot
        return parameter.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ticket,) = ctx.saved_tensors
        return None, torch.ops.ddpopt.hand_over(gradient, ticket, ctx.slot), None, None


def lend(parameter: Tensor, token: Tensor, ticket: Tensor, slot: int) -> Tensor:
    """What a graph reads in the place of a parameter.

    Args:
        parameter: the parameter, detached.
        token: from the call's gate.
        ticket: the call's.
        slot: which of the call's parameters this is.

    Returns:
        A tensor like `parameter`, whose gradient is handed over as soon as it is complete.
    """
    lent: Tensor = _Lend.apply(parameter, token, ticket, slot)  # type: ignore[no-untyped-call]
    if lent.grad_fn is not None:
        # before everything else that is ready, as the engine runs the nodes that accumulate gradients
        lent.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]  # missing in torch's stubs
    return lent


_FIRST = 2**63 - 1


def hand_over(gradient: Tensor, ticket: Tensor, slot: int) -> Tensor:
    """The operator ``ddpopt::hand_over``: a parameter's gradient is complete.

    Args:
        gradient: all that this graph adds to it.
        ticket: which call of the graph this is the backward of.
        slot: which of the call's parameters this is.

    Returns:
        The gradient of the token: an empty tensor.
    """
    call = _calls.get(int(ticket))
    if call is None:
        raise RuntimeError(f"ddpopt::hand_over: no forward with ticket {int(ticket)} waits for its backward")
    call.receive(slot, gradient)
    return gradient.new_empty(0)


def _hand_over_fake(gradient: Tensor, _ticket: Tensor, _slot: int) -> Tensor:
    return gradient.new_empty(0)


_library: Any = torch.library.Library("ddpopt", "DEF")  # type: ignore[no-untyped-call]  # torch types it not
_library.define("hand_over(Tensor gradient, Tensor ticket, int slot) -> Tensor")
_library.impl("hand_over", hand_over, "CompositeExplicitAutograd")
torch.library.register_fake("ddpopt::hand_over", _hand_over_fake, lib=_library)
