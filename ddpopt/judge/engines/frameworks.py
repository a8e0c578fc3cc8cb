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
from ddpopt.judge.engines.engine import Engine, compiled
from ddpopt.judge.engines.sharded import required


class Framework(Engine):
    """A framework that sets the model up, and runs its backward.

    Attributes:
        framework: the framework's own object, which `set_up` makes.
        wrapped: the model as the framework returned it.
        set_up: a method that makes `framework`, lets it wrap a model, and returns that.
    """

    compiles = default_group = True
    framework: Any
    wrapped: Any
    set_up: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Set the model up, and compile what the framework returns."""
        if group.size() != dist.get_world_size():
            raise UnsupportedError(
                f"{self.name} trains on the default group of {dist.get_world_size()} ranks only, "
                f"got one of {group.size()}"
            )
        self.wrapped = self.set_up(model)
        return compiled(self.wrapped, self.backend)

    def backward(self, loss: Tensor) -> None:
        """The framework's backward."""
        self.framework.backward(loss)


class Accelerated(Framework):
    """Accelerate: ``Accelerator.prepare``, its backward, clipping and optimizer."""

    def set_up(self, model: nn.Module) -> Any:
        """Prepare the model."""
        is_on_cpu = next(model.parameters()).device.type == "cpu"
        self.framework = required("accelerate").Accelerator(cpu=is_on_cpu)
        return self.framework.prepare(model)

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Prepare an optimizer."""
        return self.framework.prepare(super().optimizer(kind, **settings))

    def clip(self, max_norm: float) -> Tensor:
        """Accelerate's clipping."""
        norm: Tensor = self.framework.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Accelerate's own."""
        return self.framework.no_sync(self.wrapped)  # type: ignore[no-any-return]


class Fabricated(Framework):
    """Lightning Fabric with its DDP strategy: its backward, clipping and optimizer."""

    gives = "arguments"

    def set_up(self, model: nn.Module) -> Any:
        """Launch Fabric, and set the model up."""
        lightning = required("lightning.fabric")
        strategy = required("lightning.fabric.strategies").DDPStrategy(
            cluster_environment=required("lightning.fabric.plugins.environments").TorchElasticEnvironment(),
            **self.ddp_kwargs,
        )
        kind = next(model.parameters()).device.type
        size = dist.get_world_size(self.group)
        self.framework = lightning.Fabric(accelerator=kind, devices=size, strategy=strategy)
        self.framework.launch()
        return self.framework.setup_module(model)

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Set an optimizer up."""
        return self.framework.setup_optimizers(super().optimizer(kind, **settings))

    def clip(self, max_norm: float) -> Tensor:
        """Fabric's clipping."""
        every = super().optimizer(torch.optim.SGD, lr=0.0)  # Fabric clips what an optimizer has
        norm: Tensor = self.framework.clip_gradients(self.wrapped, every, max_norm=max_norm)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """Fabric's own."""
        return self.framework.no_backward_sync(self.wrapped)  # type: ignore[no-any-return]
