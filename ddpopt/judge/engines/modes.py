"""The ways to run a data-parallel step that can be verified: torch's, ddpopt's, and those of the user.

A mode is an `Engine`: built in, registered by an installed package, or named as ``package.module:name``.
Without a backend every built-in one runs uncompiled, so that faults of compilation can be told apart.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpopt.cases.targets import called, imported
from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.judge.engines.engine import Engine, compiled
from ddpopt.judge.engines.frameworks import Accelerated, Fabricated
from ddpopt.judge.engines.names import REGISTERED, full_name, named
from ddpopt.judge.engines.sharded import (
    ComposableReplicate,
    FullyShard,
    FullyShardedDataParallel1,
    ReplicateByFsdp,
    require_one_dtype,
)
from ddpopt.planning.plan import Strategy


class Local(Engine):
    """The model alone on each rank, with unreduced gradients."""

    compiles = True
    broadcasts_buffers = False

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Compile the model, or leave it as it is."""
        del group
        return compiled(model, self.backend)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Do nothing: nothing is ever reduced."""
        return nullcontext()


class CompiledDdp(Engine):
    """``torch.compile(DDP(model))``, under whatever setting of ``optimize_ddp`` is in force."""

    gives = "module"
    compiles = True
    observable = True

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Wrap the model in DDP, and compile that."""
        self.ddp = DistributedDataParallel(model, process_group=group, **self.ddp_kwargs)
        return self._compiled(self.ddp)

    def no_sync(self) -> AbstractContextManager[Any]:
        """DDP's own."""
        assert self.ddp is not None
        return self.ddp.no_sync()

    def _compiled(self, ddp: Any) -> Callable[..., Any]:
        return compiled(ddp, self.backend)


class PythonReducer(CompiledDdp):
    """DDP's Python reducer, with the backward captured by compiled autograd."""

    captures_backward = True
    observable = False
    optimize_ddp = "python_reducer"

    def around_backward(self) -> AbstractContextManager[Any]:
        """Capture the backward."""
        if self.backend is None:
            return nullcontext()
        return compiled_autograd._enable(torch.compile(backend=self.backend), dynamic=False)


class Ours(CompiledDdp):
    """``ddpopt.compile`` with a strategy, or ``ddpopt.train_step`` with a fusion; eager without a backend."""

    strategy: Strategy | None = None
    fusion: Literal["concat", "coalesced"] = "concat"

    def _compiled(self, ddp: Any) -> Callable[..., Any]:
        # heavy imports that other modes do not need
        from ddpopt.dynamo.api import compile as ddpopt_compile
        from ddpopt.step.api import train_step

        self.planned = self.backend is not None
        if self.backend is not None and self.strategy is not None:
            ddp = ddpopt_compile(ddp, backend=self.backend, strategy=self.strategy, fallback=None)
        elif self.backend is not None:
            self.whole = train_step(backend=self.backend, fusion=self.fusion)
        made: Callable[..., Any] = ddp
        return made


class StepReplicate(Engine):
    """``ddpopt.train_step`` of plain modules, replicated by the step; Dynamo captures it in any case."""

    gives = "arguments"
    compiles = True
    broadcasts_buffers = False  # an evaluation follows no broadcast
    parallel: Any

    def prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Callable[..., Any]:
        """Leave the model as it is; the step trains it."""
        from ddpopt.step.api import train_step

        unknown = sorted(self.ddp_kwargs.keys() - {"bucket_cap_mb", "broadcast_buffers"})
        if unknown:
            raise UnsupportedError(f"{self.name}: a module without DDP has no {' and no '.join(unknown)}")
        self.parallel = self._parallel(group)
        self.whole = train_step(backend=self.backend or "eager", parallel=self.parallel)
        return model

    def _parallel(self, group: dist.ProcessGroup) -> Any:
        from ddpopt.step.replicate import Replicate

        return Replicate(group, **self.ddp_kwargs)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Do nothing: a step sends what its backward passes add up."""
        return nullcontext()


class StepShardOptimizer(StepReplicate):
    """The same, with optimizers whose state is divided over the ranks."""

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Make an optimizer that saves and loads the whole state."""
        from ddpopt.step.sharding import divide, whole_state

        made: Any = kind(self.model.parameters(), **settings)
        shares = self.parallel.shares([self.parallel.replica(self.model, "model")])
        divide(made, shares)  # an optimizer that no step calls would not be divided, and say nothing of it
        own_state, own_load = made.state_dict, made.load_state_dict

        def load_state_dict(state: Any) -> None:
            own_load(state)
            divide(made, shares)

        made.state_dict = lambda: whole_state(own_state(), self.group)
        made.load_state_dict = load_state_dict
        return made

    def _parallel(self, group: dist.ProcessGroup) -> Any:
        from ddpopt.step.replicate import ShardOptimizer

        return ShardOptimizer(group, **self.ddp_kwargs)


class Zero(CompiledDdp):
    """DDP with ``ZeroRedundancyOptimizer``, whose ranks update parts and broadcast them."""

    observable = False

    def optimizer(self, kind: type[Optimizer], **settings: Any) -> Any:
        """Divide an optimizer over the ranks."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        require_one_dtype(self.name, self.model)
        made: Any = ZeroRedundancyOptimizer(
            self.model.parameters(), kind, process_group=self.group, **settings
        )
        own_state = made.state_dict

        def state_dict() -> Any:
            """The whole state, which torch gathers on one rank at a time."""
            found = {}
            for rank in range(self.group.size()):
                made.consolidate_state_dict(rank)
                if rank == self.group.rank():
                    found = own_state()
            return found

        made.state_dict = state_dict
        return made


MODES: tuple[Engine, ...] = (
    CompiledDdp("eager", "eager DDP: the reference", compiles=False),
    CompiledDdp("torch", "torch's DDPOptimizer", optimize_ddp="ddp_optimizer"),
    CompiledDdp("whole", "no optimization: one graph under DDP"),
    PythonReducer("python_reducer", "Python reducer under compiled autograd, fusion off"),
    Ours("ddpopt-split", "ddpopt: one segment for each bucket", strategy="split"),
    Ours("ddpopt-inline", "ddpopt: one graph", strategy="auto"),
    Ours("ddpopt-step", "ddpopt: a step in one graph"),
    Ours("ddpopt-step-coalesced", "ddpopt: the same, without a buffer for each bucket", fusion="coalesced"),
    StepReplicate("step-replicate", "ddpopt: a step in one graph, of a module without DDP"),
    StepShardOptimizer("step-shard-optimizer", "ddpopt: the same, each rank with a part of the optimizer"),
    FullyShard("fully_shard", "FSDP2 around the whole model"),
    FullyShard("fully_shard-blocks", "FSDP2 around each block, compiled block by block", by_block=True),
    FullyShard("hsdp", "FSDP2 in each row of 2 x N/2 ranks, replicated over the columns", rows=2),
    FullyShardedDataParallel1("fsdp1", "FSDP1 around each block, with use_orig_params=True"),
    ComposableReplicate("replicate", "replicate()"),
    ReplicateByFsdp("replicate-fsdp", "replicate() built on FSDP2"),
    Zero("zero", "DDP with ZeroRedundancyOptimizer"),
    Accelerated("accelerate", "Accelerate"),
    Fabricated("fabric", "Lightning Fabric"),
)
LOCAL = Local("local", "the model alone, nothing reduced")


def engines() -> tuple[Engine, ...]:
    """All engines that have a name: the built-in ones, and those of installed packages."""
    return (*MODES, *_registered().values())


def mode(given: str | Engine, given_as: str = "mode") -> Engine:
    """Return an engine by its name.

    Args:
        given: the name of a built-in or registered engine; ``package.module:name`` of an engine, or of a
            function without arguments that makes one; or the engine itself.
        given_as: the name of the caller's argument, for the error.

    Returns:
        The engine.

    Raises:
        UsageError: there is no such engine, or it cannot be made.
    """
    if isinstance(given, Engine):
        return given
    if not isinstance(given, str):
        raise UsageError(
            f"{given_as}: expected a name or a ddpopt.testing.Engine, got {given!r}; of a class, give an "
            "instance: MyEngine()"
        )
    if ":" in given:
        return _made(given, imported(given))
    known = {each.name: each for each in MODES}
    name = full_name(given)
    return named(name, known if name in known else known | _registered(), given_as)


def _made(name: str, found: Any) -> Engine:
    """Make an engine of what a name refers to; reports use that name, which other processes know too."""
    made = found if isinstance(found, Engine) or not callable(found) else called(name, found, 0)
    if not isinstance(made, Engine):
        raise UsageError(
            f"engine {name!r}: expected a ddpopt.testing.Engine, or a function without arguments that "
            f"returns one, got {type(made).__name__}"
        )
    engine = copy.copy(made)
    engine.name = name
    return engine


@functools.cache
def _registered() -> dict[str, Engine]:
    return {each.name: _made(each.name, _loaded(each)) for each in entry_points(group=REGISTERED)}


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"engine {point.name!r}: cannot import {point.value!r}: {type(error).__name__}: {error}; repair "
            "or remove the package that registers it"
        ) from error
