"""The modes without a DDP module: FSDP2 and ``replicate()``.

Each compiles the model itself and wraps a shell around it: `fully_shard` on a compiled root silently compiles
nothing, because the hooks that gather its parameters run inside the frame to compile.

Touches private names of torch: ``torch.distributed._composable.replicate``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddpopt.judge.parallel import Parallel, Setup


class Shell(nn.Module):
    """A module around the model, for hooks that belong to a root module and must not be compiled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.inner(*args, **kwargs)


def _shell(setup: Setup) -> Shell:
    if setup.backend is not None:
        setup.model.compile(backend=setup.backend)
    return Shell(setup.model)


@contextlib.contextmanager
def _unsynchronized(shell: Any) -> Iterator[None]:
    shell.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        shell.set_requires_gradient_sync(True)


def fully_sharded(setup: Setup) -> Parallel:
    """FSDP2: every parameter a DTensor, sharded along its first dimension."""
    broadcast_state(setup)
    shell: Any = fully_shard(_shell(setup), mesh=_mesh(setup))
    return Parallel(shell, setup.model, no_sync=lambda: _unsynchronized(shell))


def _mesh(setup: Setup) -> DeviceMesh:
    """Lay a mesh over the ranks.

    DTensor caches meshes by their shape, with a process group that may be gone by the next run. So the mesh
    uses the default group, which stays.
    """
    kind = next(setup.model.parameters()).device.type
    if dist.get_world_size(setup.group) == dist.get_world_size():
        return init_device_mesh(kind, (dist.get_world_size(),))
    return DeviceMesh.from_group(setup.group, kind)


def replicated(setup: Setup) -> Parallel:
    """``replicate()``: DDP's reducer, attached to a module instead of wrapped around it."""
    from torch.distributed._composable.replicate import replicate

    shell: Any = replicate(_shell(setup), process_group=setup.group, **setup.ddp_kwargs)
    broadcast_state(setup)
    return Parallel(shell, setup.model, no_sync=lambda: _unsynchronized(shell))


def broadcast_state(setup: Setup) -> None:
    """Copy the first rank's parameters to every rank, as DDP does."""
    root = dist.get_global_rank(setup.group, 0)
    with torch.no_grad():
        for tensor in (*setup.model.parameters(), *setup.model.buffers()):
            data = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
            whole = data.contiguous()
            dist.broadcast(whole, root, setup.group)
            data.copy_(whole)
