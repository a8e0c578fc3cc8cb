"""A model made data-parallel: what a mode is given and returns, and what training and judging need of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

Named = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Setup:
    """What a mode has to work with.

    Attributes:
        model: on its device already.
        group: the ranks that train it together.
        backend: of Dynamo: a name or a callable; None to compile nothing.
        ddp_kwargs: for ``DistributedDataParallel``; empty for modes without one.
    """

    model: nn.Module
    group: dist.ProcessGroup
    backend: Any
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Parallel:
    """A model made data-parallel.

    Attributes:
        call: takes the arguments of the model.
        model: the model itself, whose parameters bear the names that a user knows.
        ddp: its DDP module; None where there is none.
        planned: whether ddpopt's plan is to be in force.
        around_backward: what to run a backward in.
        no_sync: what to run forward and backward in, so that nothing is reduced.
    """

    call: Callable[..., Any]
    model: nn.Module
    ddp: DistributedDataParallel | None = None
    planned: bool = False
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext

    def gradients(self) -> Gradients:
        """Copies of the gradients of all trainable parameters, by name, None where there is none."""
        return {
            name: None if parameter.grad is None else _full(parameter.grad).detach().clone()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def state(self) -> Named:
        """Copies of all parameters and buffers, by name."""
        with torch.no_grad():
            return {name: _full(tensor).detach().clone() for name, tensor in self._tensors()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers to what `state` read from an equal model; what it has not stays."""
        with torch.no_grad():
            for name, tensor in self._tensors():
                if name in state:
                    whole = state[name]
                    if isinstance(tensor, DTensor):
                        whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
                    tensor.copy_(whole)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers."""
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
