"""Hand gradients to DDP from inside a compiled backward.

A graph that takes part has calls of `lend` between its parameters and their readers, one for all those that
DDP sends together. Its backward is the operator ``ddpopt::hand_over``, which autograd runs as soon as their
gradients are complete, and which stands at that place in the compiled backward too. What the graph gets in a
parameter's place is detached from it. Gradients that are not handed over leave through a gate, an autograd
node around the compiled code whose edges lead to the parameters:

    parameters ─────────── (detached) ──────────► lend ──► readers
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

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpopt.errors import HandOverError
from ddpopt.ready_hooks import ready_hooks
from ddpopt.running_backward import NO_TASK, running_backward, running_node, task_id, will_run

__all__ = ["GIVEN", "READ_AGAIN", "USED_AGAIN", "Call", "hand_over", "lend"]

USED_AGAIN, READ_AGAIN, GIVEN = range(3)
"""What becomes of a gradient's memory after it was handed over: code may put another value there, may still
read it, or is done with it."""


class Call:
    """One forward of a compiled graph, and what becomes of its gradients.

    Args:
        ddp: the DDP module whose forward is running, if any.
        groups: the parameters that the graph was lent, in the order of their slots: those of each call of
            `lend` together.

    Attributes:
        groups: as given.
        ticket: tells the compiled backward which call it belongs to; an int64 scalar on the CPU.
    """

    def __init__(self, ddp: DistributedDataParallel | None, groups: Sequence[Sequence[Tensor]]) -> None:
        self.ticket = torch.tensor(next(_numbers), device="cpu")
        self._hooks = None if ddp is None else ready_hooks(ddp)
        self.groups = groups
        self._parameters = tuple(itertools.chain.from_iterable(groups))
        # by backward and slot: two backwards through one retained graph may overlap
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._task = NO_TASK
        self._places: tuple[int | None, ...] = ()
        if task_id() == NO_TASK:  # else a checkpoint may be recomputing the forward of another call
            _calls[int(self.ticket)] = self

    def open_gate(self) -> tuple[Tensor, ...]:
        """Tokens for `lend`, one for each group: an empty tensor on the device of its parameters."""
        tokens: tuple[Tensor, ...] = _Gate.apply(self, *self._parameters)  # type: ignore[no-untyped-call]
        return tokens

    def receive(self, slot: int, gradient: Tensor, alone: bool) -> None:
        """The gradient of a parameter is complete: hand it over, or keep it for the gate.

        Args:
            slot: which parameter's.
            gradient: all that the graph adds to it.
            alone: whether nobody else will use the gradient's memory again.
        """
        task = task_id()
        if task != self._task:
            self._decide()
            self._task = task
        place = self._places[slot]
        if place is not None and self._hooks is not None:
            self._hooks.hand_over(place, self._parameters[slot], gradient, alone)
        else:
            # compiled code may use this memory again for its next value; a name more in Python would not show
            # that the memory has an owner now, and the same tensor may be handed over for another parameter
            self._kept[task, slot] = gradient.detach() if alone else gradient.clone()

    def holds(self, slot: int, gradient: Tensor) -> bool:
        """Whether a gradient's memory is still needed."""
        storage = gradient.untyped_storage().data_ptr()
        held = (self._kept.get((task_id(), slot)), self._parameters[slot].grad)
        return any(tensor is not None and tensor.untyped_storage().data_ptr() == storage for tensor in held)

    def claim(self, slot: int) -> Tensor | None:
        """A gradient that was kept; None where it was handed over, or where there is none."""
        return self._kept.pop((task_id(), slot), None)

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
            and parameter.requires_grad
            and not _is_hooked(parameter)
            and _is_on_default_stream(parameter)
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


def _is_on_default_stream(parameter: Tensor) -> bool:
    """Whether the gradient is computed where everybody expects it.

    At the end of a backward the engine has others wait for the streams that it accumulated on, and a gradient
    that was handed over is none of its business.
    """
    if not parameter.is_cuda:
        return True
    return bool(torch.cuda.current_stream(parameter.device) == torch.cuda.default_stream(parameter.device))


class _Gate(torch.autograd.Function):
    """Takes to the parameters what was not handed over."""

    @staticmethod
    def forward(ctx: Any, call: Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(empty_token(group[0]) for group in call.groups)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        behind = [token for token, group in zip(tokens, call.groups, strict=True) for _ in group]
        gradients = [call.claim(slot) for slot in range(len(behind))]
        if torch.is_grad_enabled():
            # create_graph: whoever differentiates again is to meet the compiled backward, which says that it
            # cannot be
            gradients = [
                g if g is None or token is None else g + token.sum()
                for g, token in zip(gradients, behind, strict=True)
            ]
        return (None, *gradients)


class _Lend(torch.autograd.Function):
    """The identity on some parameters, whose backward hands their gradients over."""

    @staticmethod
    def forward(
        ctx: Any, _: Tensor, ticket: Tensor, first_slot: int, memory: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ticket)
        ctx.first_slot, ctx.memory = first_slot, memory
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (ticket,) = ctx.saved_tensors
        complete = {slot: g for slot, g in enumerate(gradients, ctx.first_slot) if g is not None}
        token = None
        if complete:
            memory = [ctx.memory] * len(complete)
            with _kept_in_backward():
                token = torch.ops.ddpopt.hand_over([*complete.values()], ticket, [*complete], memory)
        return token, *(None for _ in range(3 + len(gradients)))


@contextlib.contextmanager
def _kept_in_backward() -> Iterator[None]:
    """Where a backward is traced: what is traced here belongs to it, even if it reads nothing of the loss.

    AOTAutograd computes in forward what can be computed there, but for what carries this mark, a private one
    of torch 2.13.
    """
    if not fx_traceback.has_preserved_node_meta():
        yield
        return
    meta: dict[str, Any] = fx_traceback.current_meta
    before = meta.get(_PARTITION)
    meta[_PARTITION] = "must_be_in_backward"
    try:
        yield
    finally:
        meta[_PARTITION] = before


_PARTITION = "partitioner_tag"


def lend(
    parameters: Sequence[Tensor], token: Tensor, ticket: Tensor, first_slot: int, memory: int
) -> tuple[Tensor, ...]:
    """What a graph reads in the place of some parameters.

    Args:
        parameters: the parameters, detached.
        token: from the call's gate.
        ticket: the call's.
        first_slot: which of the call's parameters the first of these is; the others follow it.
        memory: `USED_AGAIN`, `READ_AGAIN` or `GIVEN`: what compiled code does with a gradient's memory once
            it has handed it over.

    Returns:
        Tensors like `parameters`, whose gradients are handed over as soon as all of them are complete.
    """
    lent: tuple[Tensor, ...] = _Lend.apply(token, ticket, first_slot, memory, *parameters)  # type: ignore[no-untyped-call]
    if lent[0].grad_fn is not None:
        # before everything else that is ready, as the engine runs the nodes that accumulate gradients
        lent[0].grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]  # missing in torch's stubs
    return lent


_FIRST = 2**63 - 1


def empty_token(like: Tensor) -> Tensor:
    """A token, or the gradient of one: empty, dense, and on the device of `like`."""
    return like.new_empty(0, dtype=torch.float32, layout=torch.strided)


def hand_over(
    gradients: Sequence[Tensor], ticket: Tensor, slots: Sequence[int], memory: Sequence[int]
) -> Tensor:
    """The operator ``ddpopt::hand_over``: the gradients of some parameters are complete.

    Args:
        gradients: all that this graph adds to them, in the order in which they are handed over.
        ticket: which call of the graph this is the backward of.
        slots: which of the call's parameters these are, one for each gradient.
        memory: `USED_AGAIN`, `READ_AGAIN` or `GIVEN`, one for each gradient: what the caller does with its
            memory next.

    Returns:
        The gradient of the token: an empty tensor.
    """
    call = _calls.get(int(ticket)) or _call_behind(running_node())
    if call is None or task_id() == NO_TASK:
        raise HandOverError(
            f"ddpopt::hand_over: slot {slots[0]} of forward {int(ticket)} has a gradient, but no backward of "
            "that forward is running. Start it with backward() or torch.autograd.grad(), or compile with "
            'strategy="split"'
        )
    for gradient, slot, use in zip(gradients, slots, memory, strict=True):
        alone = use != USED_AGAIN and _is_alone(gradient)
        call.receive(slot, gradient, alone)
        if alone and use == GIVEN and not call.holds(slot, gradient):
            # it is in its bucket; compiled code may hold on to it for long
            gradient.untyped_storage().resize_(0)
    return empty_token(gradients[0])


def _call_behind(node: Any) -> Call | None:
    """The call whose gate a compiled backward leads to; where a forward was recomputed, the first one's."""
    edges = () if node is None else node.next_functions
    return next((gate.call for gate, _ in edges if isinstance(gate, _Gate._backward_cls)), None)  # type: ignore[attr-defined]


def _hand_over_fake(
    gradients: Sequence[Tensor], _ticket: Tensor, _slots: Sequence[int], _memory: Sequence[int]
) -> Tensor:
    return empty_token(gradients[0])


def _owners_in(tensors: Sequence[Tensor]) -> list[int]:
    """The operator ``ddpopt::owners``: `_owners` of the only tensor in its list."""
    (tensor,) = tensors
    return _owners(tensor)


def _owners(tensor: Tensor) -> list[int]:
    """How many references there are to a tensor in a list that an operator got, its storage and its base.

    All names in Python count as one. The engine's own, and those of other views, come on top. Touches private
    parts of torch 2.11 to 2.13: ``Tensor._use_count`` and ``torch._C._storage_Use_Count``.
    """
    counted: Any = tensor  # torch's stubs lack _use_count
    base = counted._base._use_count() if tensor._is_view() else 0
    return [counted._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), base]


@functools.cache
def _owners_of_one(is_view: bool) -> list[int]:
    """The same for a tensor, or a view of one, that only the operator's caller knows."""

    def measure() -> list[int]:
        if is_view:
            return list(torch.ops.ddpopt.owners([torch.empty(1, device="cpu").view(1)]))
        return list(torch.ops.ddpopt.owners([torch.empty(1, device="cpu")]))

    # a mode would be one more owner, and below autograd there are no views: a new thread has none of either
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(measure).result()


def _is_alone(tensor: Tensor) -> bool:
    """Whether nobody but the operator's caller can reach this tensor's memory."""
    if tensor.layout != torch.strided:
        return False  # a sparse tensor has no one storage
    alone = _owners_of_one(tensor._is_view())
    return all(count <= one for count, one in zip(_owners(tensor), alone, strict=True))


_library: Any = torch.library.Library("ddpopt", "DEF")  # type: ignore[no-untyped-call]  # torch types it not
_library.define("hand_over(Tensor[] gradients, Tensor ticket, int[] slots, int[] memory) -> Tensor")
_library.define("owners(Tensor[] tensors) -> int[]")
_library.impl("owners", _owners_in, "CompositeExplicitAutograd")
_library.impl("hand_over", hand_over, "CompositeExplicitAutograd")
torch.library.register_fake("ddpopt::hand_over", _hand_over_fake, lib=_library)
