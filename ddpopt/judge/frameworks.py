"""Engines of training frameworks: Accelerate and Lightning Fabric, where they are installed.

Invariant: a framework that is missing makes a trial "not possible", with a reason.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpopt.errors import UnsupportedError
from ddpopt.judge.engine import Engine, compiled
from ddpopt.judge.sharded import required


def _require_default(name: str, group: dist.ProcessGroup) -> None:
    if group.size() != dist.get_world_size():
        raise UnsupportedError(
            f"{name} trains on the default group of {dist.get_world_size()} ranks only, "
            f"got one of {group.size()}"
        )


class Accelerated(Engine):
    """Accelerate: ``Accelerator.prepare``, its backward, clipping and optimizer."""

    compiles = True
    accelerator: Any
    prepared_model: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Prepare the model, and compile what Accelerate returns."""
        _require_default(self.name, group)
        made = required("accelerate").Accelerator(cpu=next(model.parameters()).device.type == "cpu")
        self.accelerator = made
        self.prepared_model = made.prepare(model)
        return compiled(self.prepared_model, self.backend)

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Prepare an optimizer."""
        return self.accelerator.prepare(super().optimizer(kind, **settings))

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


class Fabricated(Engine):
    """Lightning Fabric with its DDP strategy: its backward, clipping and optimizer."""

    compiles, gives = True, "arguments"
    fabric: Any
    wrapped: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Set the model up, and compile what Fabric returns."""
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
        self.wrapped = made.setup_module(model)
        return compiled(self.wrapped, self.backend)

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Set an optimizer up."""
        return self.fabric.setup_optimizers(super().optimizer(kind, **settings))

    def backward(self, loss: Tensor) -> None:
        """Fabric's backward."""
        self.fabric.backward(loss)

    def clip(self, max_norm: float) -> Tensor:
        """Fabric's clipping."""
        every = super().optimizer(torch.optim.SGD, lr=0.0)  # Fabric clips what an optimizer has
        norm: Tensor = self.fabric.clip_gradients(self.wrapped, every, max_norm=max_norm)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Fabric's own."""
        return self.fabric.no_backward_sync(self.wrapped)  # type: ignore[no-any-return]
