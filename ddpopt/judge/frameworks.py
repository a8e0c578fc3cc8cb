"""Engines of training frameworks: Accelerate and Lightning Fabric, where they are installed.

Invariant: a framework that is missing makes a trial "not possible", with a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpopt.errors import UnsupportedError
from ddpopt.judge.engine import Engine, compiled
from ddpopt.judge.sharded import required


def _require_default(name: str, group: dist.ProcessGroup) -> None:
    if group.size() != dist.get_world_size():
        raise UnsupportedError(
            f"{name} trains on the default group of {dist.get_world_size()} ranks only, "
            f"got one of {group.size()}"
        )


class _OfFramework(Engine):
    """An engine whose optimizer a framework has wrapped."""

    compiles = True
    optimizer: Any

    def step(self, learning_rate: float) -> None:
        """The framework's optimizer, plain SGD."""
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.step()


class Accelerated(_OfFramework):
    """Accelerate: ``Accelerator.prepare``, its backward, clipping and optimizer."""

    accelerator: Any
    prepared_model: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Prepare the model and an optimizer, and compile what Accelerate returns."""
        _require_default(self.name, group)
        made = required("accelerate").Accelerator(cpu=next(model.parameters()).device.type == "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.accelerator = made
        self.prepared_model, self.optimizer = made.prepare(model, optimizer)
        return compiled(self.prepared_model, self.backend)

    def backward(self, loss: Tensor) -> None:
        """Accelerate's backward."""
        self.accelerator.backward(loss)

    def clip(self, max_norm: float) -> Tensor:
        """Accelerate's clipping."""
        norm: Tensor = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Accelerate's own."""
        return self.accelerator.no_sync(self.prepared_model)  # type: ignore[no-any-return]


class Fabricated(_OfFramework):
    """Lightning Fabric with its DDP strategy: ``Fabric.setup``, its backward, clipping and optimizer."""

    gives = "arguments"
    fabric: Any
    wrapped: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Set the model and an optimizer up, and compile what Fabric returns."""
        _require_default(self.name, group)
        lightning = required("lightning.fabric")
        strategy = required("lightning.fabric.strategies").DDPStrategy(
            cluster_environment=required("lightning.fabric.plugins.environments").TorchElasticEnvironment(),
            **self.ddp_kwargs,
        )
        kind = next(model.parameters()).device.type
        made = lightning.Fabric(accelerator=kind, devices=dist.get_world_size(group), strategy=strategy)
        made.launch()
        self.fabric = made
        self.wrapped, self.optimizer = made.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
        return compiled(self.wrapped, self.backend)

    def backward(self, loss: Tensor) -> None:
        """Fabric's backward."""
        self.fabric.backward(loss)

    def clip(self, max_norm: float) -> Tensor:
        """Fabric's clipping."""
        norm: Tensor = self.fabric.clip_gradients(self.wrapped, self.optimizer, max_norm=max_norm)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Fabric's own."""
        return self.fabric.no_backward_sync(self.wrapped)  # type: ignore[no-any-return]
