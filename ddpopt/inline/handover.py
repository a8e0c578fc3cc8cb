"""Hand gradients to DDP from inside a compiled backward.

A participating graph has calls of `lend` between its parameters and their readers, one for each group that
DDP sends together. The backward of `lend` is the operator ``ddpopt::hand_over``, which autograd runs as soon
as the group's gradients are complete, and which has the same place in the compiled backward. The graph is
compiled for parameters that do not require grad, but gets the parameters themselves: its backward reads their
current values, and saved tensor hooks see them, as with any compiled graph. Gradients that are not handed
over bypass it through a gate, an autograd node around the compiled code whose edges lead to the parameters:

    parameters ────────── (no gradient) ────────► lend ──► readers
        └──► gate ──► token (an empty tensor) ──────┘

Whether a gradient is handed over is decided in each backward, never at compile time. All of these conditions
must hold; otherwise the gradient waits until the compiled backward is over and leaves in the usual way:

- the engine will accumulate into this parameter in this backward (false under ``torch.autograd.grad``);
- nothing else in the backward sends a gradient to the parameter, so that the gradient is complete (false for
  a weight that the loss also reads, after a graph break, or with two forwards before one backward);
- the parameter still requires grad, and accumulates in its own dtype;
- there are no hooks on the parameter or its AccumulateGrad node; a user's hook runs once, at its usual time;
- no communication hook can change the parameter while later code of the backward still reads it; a hook that
  has the attribute ``only_sends = True`` changes none;
- no other input of the compiled code is in memory that DDP writes to: a gradient, or a bucket;
- the backward creates no graph, does not check for NaN and runs on the default stream, and the graph was
  called in DDP's forward.

One rank may decide otherwise than its peers, so the order of what a rank sends must not depend on that. There
is a gate for each group, and the engine runs all of them right after the compiled backward, in the order of
the groups: a bucket that leaves late is still sent before anything else can be sent. Whatever else the
compiled backward reaches directly, such as a weight that DDP ignores and whose hook communicates, gets its
gradient after the gates (`_After`), and so do parameters with hooks, in the order of the groups.

Invariant: each gradient reaches its parameter exactly once, in memory that nothing else owns: it is copied,
unless the compiler of the backward has proved that its code no longer uses that memory.
"""

from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo.compiled_autograd
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpopt.ddp.engine import (
    NO_TASK,
    has_distributed_context,
    running_backward,
    running_node,
    task_id,
    will_run,
)
from ddpopt.ddp.held import may_change_in_backward
from ddpopt.ddp.ready_hooks import ready_hooks
from ddpopt.errors import DdpoptError, HandOverError, UnsupportedError
from ddpopt.graph.nodes import storages_of
from ddpopt.inline.ambient import Ambient, nodes_before
from ddpopt.inline.owners import is_alone

COPIED, TAKEN, LATE, LAST = range(4)
"""How a gradient is handed over: copied; taken with its memory, which compiled code provably does not use,
return or alias again; copied, but at the end of the backward if the parameter, which later code reads, may
change until then; or at the end in any case."""


Groups = Sequence[Mapping[int, Tensor]]
"""The parameters of each call of `lend`, by slot."""


class Call:
    """One forward of a compiled graph, and the gradients of its backward.

    Args:
        ddp: the DDP module whose forward is running, if any.
        groups: the parameters of each call of `lend`, by slot, their position among the graph's inputs.
        others: the graph's other inputs.
        late: slots of parameters that the backward may read after their gradients are complete.

    Attributes:
        groups: as given.
    """

    def __init__(self, ddp: DDP | None, groups: Groups, others: Sequence[Any], late: Container[int]) -> None:
        self._hooks = None if ddp is None else ready_hooks(ddp)
        self._late = late
        self._comm_hooks = [] if ddp is None else ddp._comm_hooks
        self.groups = groups
        self._memory = frozenset(storages_of(others))
        self._parameters = {slot: parameter for group in groups for slot, parameter in group.items()}
        # by backward and slot: two backwards through one retained graph may overlap
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._task = NO_TASK
        self._places: dict[int, int] = {}
        self._opens: dict[int, bool] = {}
        self._ambient = Ambient()
        self._hands_over = True

    def open_gates(self) -> list[Tensor]:
        """Return tokens for `lend`, one for each group: an empty tensor on the device of its parameters.

        Raises:
            UnsupportedError: the forward runs inside a context of distributed autograd.
        """
        if torch.is_grad_enabled() and has_distributed_context():
            raise UnsupportedError(
                "a forward inside torch.distributed.autograd.context(), whose backward keeps gradients from "
                'the parameters, so that none can be handed to DDP; use ddpopt.compile(..., strategy="split")'
            )
        hooked = [slot for slot, parameter in self._parameters.items() if self._has_hooks(parameter)]
        # of all nodes that are ready, the engine runs first the one that was made last
        after = {slot: _After.apply(self._parameters[slot]) for slot in reversed(hooked)}  # type: ignore[no-untyped-call]
        tokens = [
            _Gate.apply(self, place, *({**group, **after}[slot] for slot in group))  # type: ignore[no-untyped-call]
            for place, group in reversed([*enumerate(self.groups)])
        ]
        return tokens[::-1]

    def passed_on(self, value: Any, *, is_only_read: bool) -> Any:
        """Another input of the graph; a leaf that is not this module's gets its gradient after the gates.

        Args:
            value: the input.
            is_only_read: whether the graph neither writes to it nor returns it. If it does, it must be given
                what the user gave, and no gradient of this call is handed over early.
        """
        is_trained = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
        if self._hooks is None or not is_trained or id(value) in self._hooks.places:
            return value
        if not is_only_read:
            self._hands_over = False
            return value
        return _After.apply(value)  # type: ignore[no-untyped-call]

    def follow(self, outputs: Any) -> None:
        """Note autocast around each backward of these outputs, for communication hooks."""
        if self._comm_hooks:
            self._ambient.note_before(nodes_before(outputs, _Gate._backward_cls))

    def receive(self, slot: int, gradient: Tensor, treatment: int, gate: Any) -> None:
        """Hand over the complete gradient of a parameter, or keep it for the gate.

        Args:
            slot: the parameter's slot.
            gradient: the graph's whole contribution to the gradient.
            treatment: `COPIED`, `TAKEN`, `LATE` or `LAST`.
            gate: the gate of the parameter's group, a node of the autograd graph.
        """
        task = task_id()
        if task != self._task:
            self._places = self._decided()
            self._opens = {}
            self._task = task
        if gate.place not in self._opens:
            self._opens[gate.place] = will_run(gate)
        # the proof covers only the compiled code; an operator that it calls may keep a reference
        taken = treatment == TAKEN and is_alone(gradient)
        waits = treatment == LAST or (treatment == LATE and may_change_in_backward(self._comm_hooks))
        if self._hooks is not None and slot in self._places and not waits:
            parameter = self._parameters[slot]
            if gradient.dtype != parameter.dtype:  # as in a backward under autocast; the engine casts, too
                gradient = gradient.to(parameter.dtype)
                taken = True
            with self._ambient.restored() if self._comm_hooks else nullcontext():
                self._hooks.hand_over(self._places[slot], parameter, gradient, taken)
        elif self._opens[gate.place]:
            self._kept[task, slot] = gradient.detach() if taken else gradient.clone()

    def claim(self, slot: int) -> Tensor | None:
        """Return a gradient that was kept; None if it was handed over, or if there is none."""
        return self._kept.pop((task_id(), slot), None)

    def _decided(self) -> dict[int, int]:
        """The slots whose gradients may be handed over in the running backward, and their places."""
        hooks = self._hooks
        if hooks is None or not hooks.take_over() or not self._memory.isdisjoint(hooks.written_memory()):
            return {}
        backward = running_backward()
        if not self._hands_over or backward is None or backward.creates_graph or _looks_for_nan():
            return {}
        places = {slot: hooks.places.get(id(parameter)) for slot, parameter in self._parameters.items()}
        may_change = may_change_in_backward(self._comm_hooks)
        node = running_node()
        own = {id(node), *(id(gate) for gate in _gates_of(node))}
        return {
            slot: place
            for slot, place in places.items()
            if place is not None
            and not (slot in self._late and may_change)
            and self._parameters[slot].requires_grad
            and not self._has_hooks(self._parameters[slot])
            and not _is_cast(self._parameters[slot])
            and _is_on_default_stream(self._parameters[slot])
            and backward.senders.get(id(hooks.leaves[place]), own) <= own
            and will_run(hooks.leaves[place])
        }

    def _has_hooks(self, parameter: Tensor) -> bool:
        """Whether other code has a hook on a parameter, or on its AccumulateGrad node."""
        if _is_hooked(parameter) or self._hooks is None or not self._hooks.are_in_charge:
            return _is_hooked(parameter)
        place = self._hooks.places.get(id(parameter))
        return place is not None and self._hooks.is_hooked(place)


def _looks_for_nan() -> bool:
    """Whether the engine checks each gradient for NaN, as under ``detect_anomaly``."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _is_hooked(parameter: Any) -> bool:
    """Whether a user's hook will run when this parameter gets its gradient."""
    hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return bool(hooks) or hasattr(parameter, "_in_backward_optimizers")


def _is_cast(parameter: Tensor) -> bool:
    """Whether the engine will cast this parameter's gradient to another dtype."""
    return getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype


def _is_on_default_stream(parameter: Tensor) -> bool:
    """Whether the gradient is computed on the default stream.

    At the end of a backward the engine synchronizes other streams with those that it accumulated on, but not
    with the stream of a gradient that was handed over.
    """
    if not parameter.is_cuda:
        return True
    return bool(torch.cuda.current_stream(parameter.device) == torch.cuda.default_stream(parameter.device))


class _Gate(torch.autograd.Function):
    """Passes the gradients of a group that were not handed over to the parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, place: int, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.place = place
        return empty_token(parameters[0])

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        gradients = [call.claim(slot) for slot in call.groups[ctx.place]]
        if torch.is_grad_enabled():
            # create_graph: a second differentiation must reach the compiled backward, whose error says that
            # it is not supported
            gradients = [_tied(gradient, token) for gradient in gradients]
        return (None, None, *gradients)


class _After(torch.autograd.Function):
    """The identity, made before the gates, so that a gradient which goes through it arrives after theirs."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(_: Any, gradient: Tensor | None) -> Tensor | None:
        return gradient


def _tied(gradient: Tensor | None, token: Tensor | None) -> Tensor | None:
    """Make a gradient depend on a token for autograd; a sparse gradient is returned unchanged."""
    if gradient is None or token is None or gradient.layout != torch.strided:
        return gradient
    return gradient + token.sum()


class _Lend(torch.autograd.Function):
    """The identity on some parameters, whose backward hands their gradients over."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, slots: Sequence[int], *parameters: Tensor) -> tuple[Tensor, ...]:
        # nothing is saved: saved tensor hooks would see it
        ctx.set_materialize_grads(False)
        ctx.slots = slots
        return tuple(map(_renamed, parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = {slot: g for slot, g in zip(ctx.slots, gradients, strict=True) if g is not None}
        token = None
        if found:
            with _kept_in_backward():
                token = torch.ops.ddpopt.hand_over([*found.values()], [*found], [COPIED] * len(found))
        return token, *(None for _ in range(1 + len(gradients)))


def _renamed(parameter: Tensor) -> Tensor:
    """Another tensor with the same value; a trace treats it as the parameter, and records nothing.

    If it were recorded, the view would be saved for backward instead of the parameter. Uses a private part of
    torch: ``torch._subclasses.functional_tensor.FunctionalTensor``.
    """
    if isinstance(parameter, FunctionalTensor):
        return FunctionalTensor.to_functional(parameter.from_functional())
    return parameter.detach()


def _kept_in_backward() -> AbstractContextManager[Any]:
    """Mark what is traced here as part of the backward, even if it does not depend on the loss.

    AOTAutograd moves to forward whatever can be computed there, except nodes with this mark, which is
    private in torch 2.13.
    """
    if not fx_traceback.has_preserved_node_meta():
        return nullcontext()
    return patch.dict(fx_traceback.current_meta, partitioner_tag="must_be_in_backward")


def lend(parameters: Sequence[Tensor], token: Tensor, slots: Sequence[int]) -> tuple[Tensor, ...]:
    """Make the tensors that a graph reads in place of some parameters.

    Args:
        parameters: the parameters.
        token: from the call's gate.
        slots: their positions among the graph's inputs, one for each.

    Returns:
        Tensors like `parameters`, whose gradients are handed over as soon as all of them are complete.
    """
    lent: tuple[Tensor, ...] = _Lend.apply(token, slots, *parameters)  # type: ignore[no-untyped-call]
    if lent[0].grad_fn is not None:
        # run before all other ready nodes, as the engine does with AccumulateGrad nodes
        lent[0].grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]  # missing in torch's stubs
    return lent


_FIRST = 2**63 - 1


def empty_token(like: Tensor) -> Tensor:
    """A token, or a token's gradient: empty, dense, and on the device of `like`."""
    return like.new_empty(0, dtype=torch.float32, layout=torch.strided)


def hand_over(gradients: Sequence[Tensor], slots: Sequence[int], treatment: Sequence[int]) -> Tensor:
    """The operator ``ddpopt::hand_over``, called when the gradients of some parameters are complete.

    Args:
        gradients: this graph's whole contribution to each, in the order in which they are handed over.
        slots: the parameters' positions among the graph's inputs, one for each gradient.
        treatment: `COPIED`, `TAKEN`, `LATE` or `LAST`, one for each gradient.

    Returns:
        The gradient of the token: an empty tensor.
    """
    gates = (gate for gate in _gates_of(running_node()) if slots[0] in gate.call.groups[gate.place])
    gate = next(gates, None)
    if gate is None or task_id() == NO_TASK:
        raise _no_backward(slots[0])
    for gradient, slot, how in zip(gradients, slots, treatment, strict=True):
        gate.call.receive(slot, gradient, how, gate)
    return empty_token(gradients[0])


def _no_backward(slot: int) -> DdpoptError:
    """The error for a call outside of the backward of its graph."""
    compiled_autograd = torch._dynamo.compiled_autograd
    if compiled_autograd.compiled_autograd_enabled or compiled_autograd.in_compiled_autograd_region:
        return UnsupportedError(
            "compiled autograd captures this backward, so no gradient can be handed to DDP from inside it; "
            "nothing was sent. Leave compiled autograd out: the backward of a compiled forward is compiled "
            "without it"
        )
    return HandOverError(
        f"ddpopt::hand_over: input {slot} of a compiled graph has a gradient, but no backward of that graph "
        "is running. Start it with backward() or torch.autograd.grad(), or compile with "
        'strategy="split"'
    )


def _gates_of(node: Any) -> list[Any]:
    """The gates of compiled code, found through its backward's edges: users can change saved values."""
    edges = () if node is None else node.next_functions
    return [gate for gate, _ in edges if isinstance(gate, _Gate._backward_cls)]


def _hand_over_batched(gradients: Sequence[Tensor], slots: Sequence[int], treatment: Sequence[int]) -> Tensor:
    """Several backwards at once, as in ``torch.autograd.grad(…, is_grads_batched=True)``: none hands over."""
    return hand_over(gradients, slots, [LAST] * len(treatment))


_library: Any = torch.library.Library("ddpopt", "DEF")  # type: ignore[no-untyped-call]  # torch types it not
_library.define("hand_over(Tensor[] gradients, int[] slots, int[] treatment) -> Tensor")
_library.impl("hand_over", hand_over, "CompositeExplicitAutograd")
for _batched in ("Batched", "FuncTorchBatched"):
    _library.impl("hand_over", _hand_over_batched, _batched)
torch.library.register_fake("ddpopt::hand_over", lambda given, *_: empty_token(given[0]), lib=_library)
