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
- no other edge of the backward leads to the parameter, so that the gradient is complete (false for a weight
  that the loss also reads, after a graph break, or with two forwards before one backward);
- the parameter still requires grad, and accumulates in its own dtype;
- there are no hooks on the parameter or its AccumulateGrad node; a user's hook runs once, at its usual time;
- no communication hook can change the parameter while later code of the backward still reads it; a hook that
  has the attribute ``only_sends = True`` changes none;
- no other input of the compiled code is in memory that DDP writes to: a gradient, or a bucket;
- the backward creates no graph, does not check for NaN and runs on the default stream, and the graph was
  called in DDP's forward.

Invariant: each gradient reaches its parameter exactly once, in memory that nothing else owns: it is copied,
unless the compiler of the backward has proved that its code no longer uses that memory.
"""

import functools
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpopt.ddp.engine import NO_TASK, running_backward, running_node, task_id, will_run
from ddpopt.ddp.ready_hooks import ready_hooks
from ddpopt.errors import HandOverError
from ddpopt.graph.nodes import storages_of

COPIED, TAKEN, LATE = range(3)
"""How a gradient is handed over: copied; taken with its memory, which compiled code provably does not use,
return or alias again; or only at the end of the backward, because later code reads the parameter."""


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
        # only a communication hook that runs an optimizer changes parameters during backward
        self._late, self._comm_hooks = late, [] if ddp is None else ddp._comm_hooks
        self.groups = groups
        self._memory = frozenset(storages_of(others))
        self._parameters = {slot: parameter for group in groups for slot, parameter in group.items()}
        # by backward and slot: two backwards through one retained graph may overlap
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._task, self._opens = NO_TASK, False
        self._places: dict[int, int] = {}

    def open_gate(self) -> tuple[Tensor, ...]:
        """Return tokens for `lend`, one for each group: an empty tensor on the device of its parameters."""
        tokens: tuple[Tensor, ...] = _Gate.apply(self, *self._parameters.values())  # type: ignore[no-untyped-call]
        return tokens

    def receive(self, slot: int, gradient: Tensor, treatment: int, gate: Any) -> None:
        """Hand over the complete gradient of a parameter, or keep it for the gate.

        Args:
            slot: the parameter's slot.
            gradient: the graph's whole contribution to the gradient.
            treatment: `COPIED`, `TAKEN` or `LATE`.
            gate: the call's gate, a node of the autograd graph.
        """
        task = task_id()
        if task != self._task:
            self._places = self._decided()
            self._task, self._opens = task, will_run(gate)
        # the proof covers only the compiled code; an operator that it calls may keep a reference
        taken = treatment == TAKEN and _is_alone(gradient)
        if self._hooks is not None and slot in self._places and treatment != LATE:
            parameter = self._parameters[slot]
            if gradient.dtype != parameter.dtype:  # as in a backward under autocast; the engine casts, too
                gradient, taken = gradient.to(parameter.dtype), True
            self._hooks.hand_over(self._places[slot], parameter, gradient, taken)
        elif self._opens:
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
        if backward is None or backward.creates_graph or _looks_for_nan():
            return {}
        places = {slot: hooks.places.get(id(parameter)) for slot, parameter in self._parameters.items()}
        may_step = not all(getattr(hook, "only_sends", False) for hook, _ in self._comm_hooks)
        return {
            slot: place
            for slot, place in places.items()
            if place is not None
            and not (slot in self._late and may_step)
            and self._parameters[slot].requires_grad
            and not hooks.is_hooked(place)
            and not _is_hooked(self._parameters[slot])
            and not _is_cast(self._parameters[slot])
            and _is_on_default_stream(self._parameters[slot])
            and backward.leaf_edges.get(id(hooks.leaves[place])) == _OWN_EDGES
            and will_run(hooks.leaves[place])
        }


_OWN_EDGES = 2
"""Edges to each parameter: the gate's, and the compiled code's, which brings no gradient."""


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
    """Passes the gradients that were not handed over to the parameters."""

    @staticmethod
    def forward(ctx: Any, call: Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(empty_token(next(iter(group.values()))) for group in call.groups)

    @staticmethod
    def backward(ctx: Any, *tokens: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        slots = [(slot, token) for token, group in zip(tokens, call.groups, strict=True) for slot in group]
        pairs = [(call.claim(slot), token) for slot, token in slots]
        if not torch.is_grad_enabled():
            return (None, *(gradient for gradient, _ in pairs))
        # create_graph: a second differentiation must reach the compiled backward, whose error says that it is
        # not supported
        return (None, *(_tied(gradient, token) for gradient, token in pairs))


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
        treatment: `COPIED`, `TAKEN` or `LATE`, one for each gradient.

    Returns:
        The gradient of the token: an empty tensor.
    """
    gate = _gate_of(running_node())
    if gate is None or task_id() == NO_TASK:
        raise HandOverError(
            f"ddpopt::hand_over: input {slots[0]} of a compiled graph has a gradient, but no backward of "
            "that graph is running. Start it with backward() or torch.autograd.grad(), or compile with "
            'strategy="split"'
        )
    for gradient, slot, how in zip(gradients, slots, treatment, strict=True):
        gate.call.receive(slot, gradient, how, gate)
    return empty_token(gradients[0])


def _gate_of(node: Any) -> Any:
    """The gate of compiled code, found through its backward's edges: users can change saved values."""
    edges = () if node is None else node.next_functions
    return next((gate for gate, _ in edges if isinstance(gate, _Gate._backward_cls)), None)


def _hand_over_batched(gradients: Sequence[Tensor], slots: Sequence[int], treatment: Sequence[int]) -> Tensor:
    """Several backwards at once, as in ``torch.autograd.grad(…, is_grads_batched=True)``: none hands over."""
    return hand_over(gradients, slots, [LATE] * len(treatment))


def _owners(tensors: Sequence[Tensor]) -> list[int]:
    """The operator ``ddpopt::owners``: count the references to the only tensor in its list.

    Counts references to the tensor itself, to its storage and to its base. All Python references count as
    one; those of the engine and of other views are added. Uses private parts of torch:
    ``Tensor._use_count`` and ``torch._C._storage_Use_Count``.
    """
    tensor: Any  # torch's stubs lack _use_count
    (tensor,) = tensors
    base = tensor._base._use_count() if tensor._is_view() else 0
    return [tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata), base]


@functools.cache
def _owners_of_one(is_view: bool) -> list[int]:
    """The same counts for a tensor, or a view of one, that only the operator's caller references."""

    def measure() -> list[int]:
        if is_view:
            return list(torch.ops.ddpopt.owners([torch.empty(1, device="cpu").view(1)]))
        return list(torch.ops.ddpopt.owners([torch.empty(1, device="cpu")]))

    # a mode would be one more owner, and below autograd there are no views: a new thread has neither problem
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(measure).result()


def _is_alone(tensor: Tensor) -> bool:
    """Whether only the operator's caller can reach this tensor's memory."""
    if tensor.layout != torch.strided:
        return False  # a sparse tensor has no single storage
    alone = _owners_of_one(tensor._is_view())
    return all(count <= one for count, one in zip(_owners([tensor]), alone, strict=True))


_library: Any = torch.library.Library("ddpopt", "DEF")  # type: ignore[no-untyped-call]  # torch types it not
_library.define("hand_over(Tensor[] gradients, int[] slots, int[] treatment) -> Tensor")
_library.define("owners(Tensor[] tensors) -> int[]")
_library.impl("owners", _owners, "CompositeExplicitAutograd")
_library.impl("hand_over", hand_over, "CompositeExplicitAutograd")
for _batched in ("Batched", "FuncTorchBatched"):
    _library.impl("hand_over", _hand_over_batched, _batched)
torch.library.register_fake("ddpopt::hand_over", lambda given, *_: empty_token(given[0]), lib=_library)
