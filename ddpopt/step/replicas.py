"""The modules of a step whose replicas its ranks keep equal: what is averaged, and how it is sent.

Invariant: what a step reads of a module is read here, whether the module is wrapped in DDP or not.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.step.transport import Transport

torch.library.define("ddpopt::average", "(Tensor gradient, int slot) -> Tensor")
AVERAGE: Any = torch.ops.ddpopt.average.default
"""Marks a gradient that is averaged, until its bucket takes the mark's place."""
torch.library.define("ddpopt::synchronized", "(int module, Tensor[] outputs, Tensor[] parameters) -> ()")
torch.library.impl("ddpopt::synchronized", "default", lambda *_: None)
SYNCHRONIZED: Any = torch.ops.ddpopt.synchronized
"""Marks the end of a forward after which DDP reduces; the module is given by its ``id``."""
torch.fx.node.has_side_effect(SYNCHRONIZED.default)
torch.fx.node.has_side_effect(SYNCHRONIZED)
Placed = tuple[Sequence[ParamSpec], str]
"""The parameters of a bucket, and why it ends there."""


@dataclass(frozen=True, eq=False)
class Replica(ABC):
    """A module in a step, of which each rank has a replica.

    Attributes:
        name: as the user would write it.
        owner: the module that the user calls: the DDP module, or a plain one.
        used_somewhere: the names of the parameters that any rank uses, if the module looks for them and the
            ranks have said it; else those that this rank uses are averaged.
    """

    name: str
    owner: Any
    used_somewhere: frozenset[str] | None = None

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module that holds the parameters, by the names that plans have."""

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """The ranks that have a replica."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which the ranks compare what they are about to send."""

    @property
    @abstractmethod
    def transport(self) -> Transport | None:
        """How gradients are sent; None if a graph cannot have that."""

    @property
    def form(self) -> Sequence[tuple[str, Any]]:
        """What all ranks must have alike of the module's state; nothing where that was compared before."""
        return ()

    @property
    def looks_for_unused(self) -> bool:
        """Whether the ranks ask each other in each step which parameters are used."""
        return False

    @property
    def is_joining(self) -> bool:
        """Whether ranks may have no inputs left, and repeat what the others send."""
        return False

    @abstractmethod
    def specs(self) -> Sequence[ParamSpec]:
        """The parameters that are averaged.

        Raises:
            UnsupportedError: the module has an option that a step does not support.
            UsageError: its parameters were replaced.
        """

    @abstractmethod
    def buckets(self, ready: Sequence[ParamSpec]) -> list[Placed]:
        """The parameters of each bucket.

        Args:
            ready: those that the step averages, in the order in which their gradients are ready.
        """


@dataclass(frozen=True)
class Averaged:
    """A parameter whose gradient is averaged.

    Attributes:
        replica: the module that has it.
        spec: of the parameter.
        sent: ``id`` of the parameter, and the group; modules may share both.
    """

    replica: Replica
    spec: ParamSpec
    sent: tuple[int, str]


Known = Mapping[int, Sequence[Averaged]]
"""What modules average, by ``id`` of the parameter."""


def source_name(source: Any) -> str:
    """The name of an object in the user's code, from Dynamo's."""
    pattern = r"^[LG]\['(\w+)'\]|\._(?:modules|parameters|buffers)\['(\w+)'\]"
    return re.sub(pattern, lambda found: found[1] or f".{found[2]}", source.name)


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy the first rank's values, in one broadcast for each dtype and device."""
    kinds: dict[tuple[Any, Any], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for alike in kinds.values():
            flat = torch.cat([each.reshape(-1) for each in alike])
            sent = torch.ops._c10d_functional.broadcast(flat, 0, group.group_name)
            received = torch.ops._c10d_functional.wait_tensor(sent)
            for each, piece in zip(alike, received.split([b.numel() for b in alike]), strict=True):
                each.data.copy_(piece.view(each.shape))  # unseen by autograd, as in DDP
