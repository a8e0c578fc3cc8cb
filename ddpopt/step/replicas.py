"""The DDP modules of a step: what they average, and how they broadcast buffers.

Invariant: a gradient is averaged in exactly those backwards in which DDP would reduce it, once in each step.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.step.settings import WHAT
from ddpopt.step.transport import transport_of

torch.library.define("ddpopt::average", "(Tensor gradient, int slot) -> Tensor")
AVERAGE: Any = torch.ops.ddpopt.average.default
"""Marks a gradient that is averaged, until its bucket takes the mark's place."""
torch.library.define("ddpopt::synchronized", "(int module, Tensor[] outputs, Tensor[] parameters) -> ()")
torch.library.impl("ddpopt::synchronized", "default", lambda *_: None)
SYNCHRONIZED: Any = torch.ops.ddpopt.synchronized
"""Marks the end of a forward after which DDP reduces; the module is given by its ``id``."""
torch.fx.node.has_side_effect(SYNCHRONIZED.default)
torch.fx.node.has_side_effect(SYNCHRONIZED)
INSTEAD = "use ddpopt.compile(model), or fallback='inline'"


@dataclass(frozen=True, eq=False)
class Replica:
    """A DDP module in a step.

    Attributes:
        name: as the user would write it.
        ddp: the module.
        used_somewhere: the names of the parameters that any rank uses, if the module looks for them and the
            ranks have said it; else those that this rank uses are averaged.
    """

    name: str
    ddp: DistributedDataParallel
    used_somewhere: frozenset[str] | None = None


@dataclass(frozen=True)
class Averaged:
    """A parameter whose gradient a DDP module averages.

    Attributes:
        replica: the module.
        spec: of the parameter.
        sent: ``id`` of the parameter, and the group; modules may share both.
    """

    replica: Replica
    spec: ParamSpec
    sent: tuple[int, str]


def looks_for_unused(ddp: Any) -> bool:
    """Whether DDP looks in each iteration for parameters that are not used, on any rank."""
    return bool(ddp.find_unused_parameters and not ddp.static_graph)


def source_name(source: Any) -> str:
    """The name of an object in the user's code, from Dynamo's."""
    pattern = r"^[LG]\['(\w+)'\]|\._(?:modules|parameters|buffers)\['(\w+)'\]"
    return re.sub(pattern, lambda found: found[1] or f".{found[2]}", source.name)


def slots_of(replicas: Iterable[Replica]) -> Mapping[int, Sequence[Averaged]]:
    """What modules average, by ``id`` of the parameter.

    Raises:
        UnsupportedError: a module has an option that a step does not support.
        UsageError: its parameters were replaced.
    """
    found: dict[int, list[Averaged]] = {}
    for replica in replicas:
        ddp: Any = replica.ddp
        require_plain_ddp(replica.name, ddp)
        parameters = dict(ddp.module.named_parameters())
        if not {*map(id, ddp._module_parameters)} <= {*map(id, parameters.values())}:
            raise UsageError(f"{WHAT}: parameters of {replica.name} were replaced; wrap it in DDP again")
        for spec in specs_from_ddp(ddp):
            if spec.sparse:
                raise UnsupportedError(f"{WHAT}: {spec.name!r} has sparse gradients; {INSTEAD}")
            key = id(parameters[spec.name])
            found.setdefault(key, []).append(Averaged(replica, spec, (key, ddp.process_group.group_name)))
    return found


def require_plain_ddp(name: str, ddp: Any) -> None:
    """Check that a module has no options that a step does not know; raises UnsupportedError."""
    problems = {
        "a communication hook that is none of torch's default ones": transport_of(ddp) is None,
        "mixed_precision": ddp.mixed_precision is not None,
        "a buffer hook": hasattr(ddp, "buffer_hook"),
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
    }
    if wrong := [what for what, there in problems.items() if there]:
        raise UnsupportedError(f"{WHAT} does not support that {name} uses {' and '.join(wrong)}; {INSTEAD}")


def require_no_node_hooks(asked: Iterable[tuple[str, Sequence[Callable[[], bool]]]]) -> None:
    """Check that no AccumulateGrad node has hooks of a user; raises UnsupportedError.

    Args:
        asked: the name of each parameter, and what `users_hooks` returned for it.
    """
    for name, kinds in asked:
        if any(has_hooks() for has_hooks in kinds):
            raise UnsupportedError(
                f"{WHAT} does not support hooks on the AccumulateGrad node of {name}; {INSTEAD}"
            )


def require_no_modes() -> None:
    """Check that no mode of torch watches operators or gradients; raises UnsupportedError.

    Dynamo compiles nothing under one, and remembers that for later calls.
    """
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        raise UnsupportedError(
            f"{WHAT} cannot run under anomaly detection, which looks at the values of each gradient; run the "
            f"undecorated function there, or {INSTEAD}"
        )
    active = [mode for mode in _get_current_dispatch_mode_stack() if not mode.is_infra_mode()]
    modes = [type(mode).__name__.strip("_") for mode in active]
    if modes:
        raise UnsupportedError(
            f"{WHAT} cannot run under {modes[-1]}, as Dynamo compiles nothing there; call the step outside "
            f"of it, and the undecorated function inside it, or {INSTEAD}"
        )


def broadcast_buffers(ddp: Any) -> None:
    """Copy the first rank's buffers, in one broadcast for each dtype and device."""
    kinds: dict[tuple[Any, Any], list[Tensor]] = {}
    for name, buffer in ddp.module.named_buffers():
        if name not in ddp.parameters_to_ignore:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    with torch.no_grad():
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            sent = torch.ops._c10d_functional.broadcast(flat, 0, ddp.process_group.group_name)
            received = torch.ops._c10d_functional.wait_tensor(sent)
            for buffer, piece in zip(buffers, received.split([b.numel() for b in buffers]), strict=True):
                buffer.data.copy_(piece.view(buffer.shape))  # unseen by autograd, as in DDP
