"""torch's engines without a DDP module: FSDP2, HSDP, FSDP1, and both kinds of ``replicate()``.

What is compiled lies inside what is sharded: `fully_shard` on a compiled module silently compiles nothing,
because the hooks that gather its parameters run inside the frame to compile.

Touches private names of torch: ``torch.distributed._composable``.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ddpopt.errors import UnsupportedError
from ddpopt.judge.engines.engine import Engine, Gradients, Named, compiled


class Shell(nn.Module):
    """A module around a compiled one, for hooks that must not be compiled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.inner(*args, **kwargs)


class Shelled(Engine):
    """An engine that compiles the model, and manages a shell around it.

    Attributes:
        shell: in a run, the managed module.
    """

    compiles = True
    shell: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Compile the model, and have the shell around it managed."""
        broadcast_state(model, group)
        if self.backend is not None:
            model.compile(backend=self.backend)
        self.shell = self.managed(Shell(model), group)
        return self.shell  # type: ignore[no-any-return]

    def managed(self, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        """Make a module data-parallel."""
        raise NotImplementedError

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set the managed parameters; a forward without a backward leaves gathered ones in their place."""
        for module in self.shell.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        super().load(state)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Switch the reduction off."""
        self.shell.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.shell.set_requires_gradient_sync(True)


class FullyShard(Shelled):
    """FSDP2: every parameter a DTensor, sharded along its first dimension.

    Attributes:
        by_block: whether each block is sharded and compiled on its own, as large models are.
        rows: the number of groups of ranks that hold a whole model each (HSDP); 1 for plain FSDP.
    """

    is_sharded = moves_parameters = default_group = sends_as_uncompiled = True
    broadcasts_buffers = False
    by_block: bool = False
    rows: int = 1

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Shard the model, or each of its blocks and the rest."""
        if not self.by_block:
            return super().prepare(model, group)
        self.shell = managed_by_block(self, model, group)
        return self.shell  # type: ignore[no-any-return]

    def managed(self, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        """Shard a module."""
        size = dist.get_world_size(group)
        if size % self.rows or size // self.rows < min(2, self.rows):
            raise UnsupportedError(f"{self.name} needs {self.rows} x N ranks with N > 1, got {size}")
        require_one_dtype(self.name, module)
        fully_shard(module, mesh=mesh_of(module, group, self.rows))  # which changes the module's class
        return module


class ReplicateByFsdp(Shelled):
    """The ``replicate()`` that is built on FSDP2: every parameter a whole DTensor on each rank."""

    moves_parameters = default_group = sends_as_uncompiled = True
    broadcasts_buffers = False

    def managed(self, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        """Replicate a module."""
        require_one_dtype(self.name, module)
        replicate = required("torch.distributed._composable.replicate_with_fsdp").replicate
        return replicate(module, mesh=mesh_of(module, group))  # type: ignore[no-any-return]


class ComposableReplicate(Shelled):
    """The older ``replicate()``: DDP's reducer, attached to a module instead of wrapped around it."""

    gives = "arguments"

    def managed(self, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        """Replicate a module."""
        from torch.distributed._composable.replicate import replicate

        return replicate(module, process_group=group, **self.ddp_kwargs)


class FullyShardedDataParallel1(Engine):
    """FSDP1: the parameters of each block are views of one flat parameter, of which a rank holds a part.

    Attributes:
        use_orig_params: as in FSDP's constructor.
    """

    compiles = is_sharded = moves_parameters = default_group = sends_as_uncompiled = True
    broadcasts_buffers = False
    use_orig_params: bool = True
    root: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Compile and shard each block, and shard the rest."""
        if not self.use_orig_params:
            raise UnsupportedError(
                f"{self.name} with use_orig_params=False: Dynamo does not trace it, and parameters have no "
                "gradients of their own. Pass use_orig_params=True, or use fully_shard"
            )
        self.root = managed_by_block(self, model, group)
        return self.root  # type: ignore[no-any-return]

    def managed(self, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        """Shard a module."""
        device = next(iter(module.parameters())).device
        return FullyShardedDataParallel(
            module, process_group=group, use_orig_params=self.use_orig_params, device_id=device
        )

    def gradients(self) -> Gradients:
        """Gather the gradients."""
        with self._whole(writeback=False, with_grads=True):
            return super().gradients()

    def state(self) -> Named:
        """Gather the parameters."""
        with self._whole(writeback=False):
            return super().state()

    def load(self, state: Named) -> None:  # type: ignore[override]
        """Set whole parameters, and shard them again."""
        with self._whole(writeback=True):
            super().load(state)

    def clip(self, max_norm: float) -> Tensor:
        """FSDP's own: a rank has only parts of the gradients."""
        norm: Tensor = self.root.clip_grad_norm_(max_norm)
        return norm

    def no_sync(self) -> AbstractContextManager[Any]:
        """FSDP's own."""
        return self.root.no_sync()  # type: ignore[no-any-return]

    def _whole(self, **how: bool) -> AbstractContextManager[Any]:
        return FullyShardedDataParallel.summon_full_params(self.root, **how)


def managed_by_block(
    engine: FullyShard | FullyShardedDataParallel1, model: nn.Module, group: dist.ProcessGroup
) -> nn.Module:
    """Have an engine manage each block, compiled on its own, and then what is left of the model.

    Blocks that share parameters are left to the model, because FSDP manages each parameter in one place.
    """
    broadcast_state(model, group)
    found = list(blocks(model))
    if engine.backend is not None and not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no submodule with parameters to compile on its own"
        )
    distinct = dict.fromkeys(block for _, _, block in found)
    owners = Counter(id(parameter) for block in distinct for parameter in block.parameters())
    made: dict[nn.Module, nn.Module] = {}
    for block in distinct:
        # compiled by a module around it, so that hooks of the engine are not inside the frame
        made[block] = compiled(block, engine.backend)
        if all(owners[id(parameter)] == 1 for parameter in block.parameters()):
            made[block] = engine.managed(made[block], group)
    for owner, name, block in found:
        setattr(owner, name, made[block])
    return engine.managed(model, group)


def blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The children of a model that have parameters, those of lists and dicts instead of the containers.

    Yields:
        The module that holds a block, its name there, and the block.
    """
    for name, child in list(model._modules.items()):  # with modules that have two names, under both
        if child is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield model, name, child


def mesh_of(module: nn.Module, group: dist.ProcessGroup, rows: int = 1) -> DeviceMesh:
    """Lay a mesh over the ranks.

    DTensor caches meshes by their shape, with a process group that may be gone by the next run. So the mesh
    uses the default group, which stays.
    """
    kind = next(iter(module.parameters())).device.type
    if dist.get_world_size(group) == dist.get_world_size():
        return _mesh(kind, rows, dist.group.WORLD)
    if rows > 1:
        raise UnsupportedError(
            f"{rows} rows need the default group, got one of {dist.get_world_size(group)} ranks"
        )
    return DeviceMesh.from_group(group, kind)


@functools.cache
def _mesh(kind: str, rows: int, world: dist.ProcessGroup) -> DeviceMesh:
    """Make a mesh of all ranks once: one of several rows makes groups, which stay."""
    size = world.size()
    if rows == 1:
        return init_device_mesh(kind, (size,))
    return init_device_mesh(kind, (rows, size // rows), mesh_dim_names=("replicate", "shard"))


def require_one_dtype(name: str, module: nn.Module) -> None:
    """Check that an engine can manage a module.

    Args:
        name: the engine's name.
        module: the module; its parameters that FSDP2 manages already, which are DTensors, do not count.

    Raises:
        UnsupportedError: its trainable parameters have several dtypes, which FSDP2 and
            ``ZeroRedundancyOptimizer`` do not take.
    """
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    dtypes = {str(parameter.dtype) for parameter in trained if not isinstance(parameter, DTensor)}
    if len(dtypes) > 1:
        raise UnsupportedError(f"{name} takes parameters of one dtype, got {', '.join(sorted(dtypes))}")


def required(module: str) -> Any:
    """Import a module that not every installation has.

    Raises:
        UnsupportedError: it is missing.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"{module} is not installed here: {error}") from error


def broadcast_state(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Copy the first rank's parameters and buffers to every rank, as DDP does."""
    root = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            data = torch.view_as_real(tensor.data) if tensor.is_complex() else tensor.data
            whole = data.contiguous()
            dist.broadcast(whole, root, group)
            data.copy_(whole)
