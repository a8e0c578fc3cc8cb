"""A data-parallel model: the input and output of a mode, and what training and judging need from it."""

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
    """The input of a mode.

    Attributes:
        model: the model, already on its device.
        group: the ranks that train it together.
        backend: the Dynamo backend, a name or a callable; None to compile nothing.
        ddp_kwargs: arguments for ``DistributedDataParallel``; empty for modes without one.
    """

    model: nn.Module
    group: dist.ProcessGroup
    backend: Any
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Parallel:
    """A data-parallel model.

    Attributes:
        call: takes the arguments of the model.
        model: the model itself, with the parameter names that a user knows.
        ddp: its DDP module; None if there is none.
        planned: whether ddpopt's plan should be in force.
        around_backward: makes the context manager for a backward.
        no_sync: makes the context manager for forward and backward without reduction.
        whole: makes one graph of a step function; None in modes that compile only the model.
    """

    call: Callable[..., Any]
    model: nn.Module
    ddp: DistributedDataParallel | None = None
    planned: bool = False
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: Callable[[Any], Any] | None = None

    def gradients(self) -> Gradients:
        """Copies of the gradients of all trainable parameters, by name; None for a missing gradient."""
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
        """Load parameters and buffers that `state` read from an equal model; others stay unchanged."""
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
