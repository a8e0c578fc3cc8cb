"""Recording every collective that a block of code launches, without changing its behavior.

Collectives are operators of torch's dispatcher, so a dispatch mode sees them: those of DDP's reducer, which
C++ launches from inside backward, as well as those that Python or compiled code launches.

Invariant: the mode passes every operator on unchanged. Dynamo compiles as it does without the mode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpopt.ddp.engine import NO_TASK, task_id
from ddpopt.inline.handover import hand_over

NAMESPACES = ("c10d", "_c10d_functional")
# Waiting is not a launch.
NOT_COLLECTIVES = ("wait_tensor",)
SENDS_AS = {
    "all_reduce": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "allgather_base": "allgather",
    "all_gather_into_tensor": "allgather",
    "all_gather_into_tensor_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_base": "alltoall",
    "all_to_all_single": "alltoall",
}
"""Operators that send what another one does: a compiler replaces collectives by functional ones."""
GOING = ("reduce", "gather", "send", "isend")
"""Operators that send to the rank that they name; others receive from it."""
SUM = "sum"
PEER = ("root_rank", "src", "dst")
# The argument names of the tensors that these operators send, as in torch's schemas.
SENT = ("tensors", "input_tensors", "input_tensor", "inputs", "input")


@dataclass(frozen=True)
class Launch:
    """One launched collective.

    Attributes:
        op: ``"allreduce"``, ``"broadcast"``, …: the operator's name without leading or trailing underscores.
        numel: elements that this rank sends.
        nbytes: bytes that this rank sends.
        dtype: of the first tensor, for instance ``"float32"``; empty if there is none.
        in_backward: whether it was launched from inside a backward.
        group: name of its process group.
        reduction: ``"max"``, ``"avg"``, …; empty for a sum, and for what reduces nothing.
        peer: the root of a collective, or the other end of a message, by its rank in the group; None if there
            is none.
    """

    op: str
    numel: int
    nbytes: int
    dtype: str
    in_backward: bool
    group: str
    reduction: str = ""
    peer: int | None = None

    @property
    def how(self) -> str:
        """The reduction and the root, or the other end, in words; empty for a sum."""
        end = "" if self.peer is None else f"{'to' if self.op in GOING else 'from'} rank {self.peer}"
        return f"{self.reduction} {end}".strip()


def sends_as(op: str) -> str:
    """The name of what an operator sends, whether it is written by hand or by a compiler.

    >>> sends_as("all_reduce"), sends_as("broadcast")
    ('allreduce', 'broadcast')
    """
    return SENDS_AS.get(op, op)


class Described(Protocol):
    """What can be said of a collective."""

    @property
    def op(self) -> str:
        """The name of its operator."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank sends."""

    @property
    def dtype(self) -> str:
        """The type of what it sends."""

    @property
    def how(self) -> str:
        """Its reduction and root."""


def kind_of(sent: Described) -> str:
    """The kind of a collective, with its reduction and root."""
    return f"{sends_as(sent.op)} ({sent.how})" if sent.how else sends_as(sent.op)


def words_of(sent: Described) -> str:
    """Describe a collective.

    >>> words_of(Launch("reduce", 2, 8, "float32", in_backward=False, group="0", reduction="max", peer=1))
    'reduce (max to rank 1) of 8 bytes of float32'
    """
    return f"{kind_of(sent)} of {sent.nbytes} bytes of {sent.dtype}" if sent.dtype else kind_of(sent)


class LaunchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Reports every collective, and every operator that runs outside of backward.

    Args:
        on_launch: called after each launch, in launch order, on the launching thread.
        on_forward: called for each other operator that runs outside of backward.
    """

    # Otherwise a higher-order operator (checkpoint, flex attention) refuses to run under this mode.
    supports_higher_order_operators = True

    def __init__(self, on_launch: Callable[[Launch], None], on_forward: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._on_launch = on_launch
        self._on_forward = on_forward

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Tell Dynamo not to skip compilation because of this mode."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell Dynamo that this mode need not see operators that run during compilation."""
        return True

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and report it."""
        if func is torch.ops.ddpopt.hand_over.default and type(args[0][0]) is Tensor:  # not while tracing
            with self:  # the mode must also see the reducer's launches inside this operator
                return hand_over(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if getattr(func, "namespace", "") in NAMESPACES:
            self._note(func, args, kwargs or {})
        elif task_id() == NO_TASK:
            self._on_forward()
        return result

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        launch = launch_of(func._schema, args, kwargs)
        if launch is not None:
            self._on_launch(launch)


def launch_of(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch | None:
    """What a call of an operator launches; None if that is no collective.

    Args:
        schema: the operator's schema.
        args: its positional arguments.
        kwargs: its others.
    """
    op = schema.name.partition("::")[2].strip("_")
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _group_name(given)
    if op in NOT_COLLECTIVES or not group:
        return None
    values = tree_leaves([given.get(name) for name in SENT])
    sent = [value for value in values if isinstance(value, Tensor)]
    return Launch(
        op=op,
        numel=sum(tensor.numel() for tensor in sent),
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in sent),
        dtype=str(sent[0].dtype).removeprefix("torch.") if sent else "",
        in_backward=task_id() != NO_TASK,
        group=group,
        reduction=_reduction(given.get("reduce_op")),
        peer=next((int(given[name]) for name in PEER if given.get(name) is not None), None),
    )


def _reduction(given: Any) -> str:
    """The name of a reduction: functional collectives give it, others an object of TorchScript."""
    if given is None:
        return ""
    c10d: Any = torch._C._distributed_c10d  # torch does not list all of it
    name = given if isinstance(given, str) else c10d.ReduceOp.RedOpType(given.op()).name
    return "" if name.lower() == SUM else name.lower()


def _group_name(arguments: Mapping[str, Any]) -> str:
    if "group_name" in arguments:
        return str(arguments["group_name"])
    boxed = arguments.get("process_group")
    # Private: operators carry groups as TorchScript objects.
    return "" if boxed is None else str(torch._C._distributed_c10d.ProcessGroup.unbox(boxed).group_name)
