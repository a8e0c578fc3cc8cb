"""Steps of plain modules: each rank keeps a whole replica, and the step averages gradients by itself.

A gradient is averaged before anything reads it but the parameter's next accumulation. So several backward
passes whose gradients add up send them once, after the last one, as under DDP's ``no_sync()``.

Invariant: before the first step all ranks have the first rank's parameters and buffers; equal gradients keep
the parameters equal from then on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpopt.ddp.specs import specs_from_module
from ddpopt.ddp.state import state_of
from ddpopt.errors import UsageError
from ddpopt.planning.bucket_rule import ParamSpec, ready_buckets
from ddpopt.planning.limits import BucketConfig
from ddpopt.step.parallel import Own, Ownership, Parallel, outermost
from ddpopt.step.replicas import Averaged, Known, Placed, Replica, broadcast
from ddpopt.step.settings import WHAT
from ddpopt.step.sharding import divide, owners_in, traced, whole_state
from ddpopt.step.transport import REDUCER, Transport


@dataclass(frozen=True)
class Replicate(Parallel):
    """Train plain modules in a `train_step`, as `DistributedDataParallel` would train them.

    With the first step, parameters and buffers of the first rank are copied to the others. Gradients are
    averaged in the buckets that DDP would use, and rounded as by its reducer.

    Args:
        group: the ranks that train the modules together; by default all.
        bucket_cap_mb: limit of a bucket in MiB, as in DDP; by default 25, and 1 for the first bucket.
        broadcast_buffers: whether ranks also get the first rank's buffers before each step, as in DDP.

    Raises:
        UsageError: `bucket_cap_mb` is no size that DDP takes.
    """

    group: dist.ProcessGroup | None = None
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool = True
    limits: BucketConfig = field(init=False, repr=False)

    kind = nn.Module

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", BucketConfig.from_kwargs(bucket_cap_mb=self.bucket_cap_mb))

    @property
    def _group(self) -> dist.ProcessGroup:
        group: Any = self.group if self.group is not None else dist.group.WORLD
        if group is None:
            raise UsageError(f"{WHAT}: parallel={self} needs a process group; call init_process_group()")
        return group  # type: ignore[no-any-return]  # it is one

    def replica(self, owner: Any, name: str) -> "PlainReplica":
        """What a step reads of a plain module."""
        return PlainReplica(name, owner, how=self)

    def replicas(self, called: Sequence[Replica], near: Own, inputs: Sequence[Any]) -> tuple[Replica, ...]:
        """The outermost modules that hold parameters of the step.

        Raises:
            UsageError: the step calls a DDP module, or trains a parameter of no module that it can read.
        """
        wrapped = [name for name, each in near.items() if isinstance(each, DistributedDataParallel)]
        if called or wrapped:
            names = ", ".join(dict.fromkeys([*(each.name for each in called), *wrapped]))
            raise UsageError(
                f"{WHAT}: parallel={self} takes plain modules, got the DDP module {names}; pass its .module, "
                "or leave parallel= out"
            )
        trained = {id(each): each for each in inputs if isinstance(each, nn.Parameter) and each.requires_grad}
        found = [
            self.replica(module, name)
            for name, module in outermost(near).items()
            if {id(each) for each in module.parameters()} & trained.keys()
        ]
        known = {id(each) for replica in found for each in replica.module.parameters()}
        unknown = [each for key, each in trained.items() if key not in known]
        if unknown or not found:
            shapes = ", ".join(str(tuple(each.shape)) for each in unknown) or "none"
            raise UsageError(
                f"{WHAT}: expected parameters of modules that the step takes as arguments, finds as "
                f"attributes of these, or reads as variables; parameters of other modules have the shapes "
                f"{shapes}. Pass their module to the step"
            )
        return (*found,)

    def averaging(
        self,
        known: Known,
        replicas: Sequence[Replica],
        forwards: Mapping[int, int],
    ) -> "EachAccumulation":
        """Every accumulation that something reads."""
        del replicas, forwards
        return EachAccumulation(known)

    def running(self, replicas: Sequence[Replica], averaging: Any) -> "RunningReplicas":
        """Broadcast parameters once, and buffers before each step."""
        del averaging
        return RunningReplicas(self, replicas)

    def forget(self) -> None:
        """Nothing: it keeps nothing of a step."""

    def reading(self, owner: Any) -> tuple[str, Any]:
        """The name of the process group."""
        return self.replica(owner, "").group.group_name, self.limits


@dataclass(frozen=True)
class ShardOptimizer(Replicate):
    """Like `Replicate`, but each rank keeps the state of an optimizer for its own parameters only.

    Each parameter belongs to one rank, which updates it and sends it to the others. The parameters are those
    of `Replicate`, bit for bit, as each is updated by the same operators.

    Args:
        group: as for `Replicate`.
        bucket_cap_mb: as for `Replicate`.
        broadcast_buffers: as for `Replicate`.
    """

    def shares(self, replicas: Iterable[Replica]) -> Ownership:
        """Divide the parameters of each module by their sizes."""
        owners: dict[int, int] = {}
        rank = 0
        for each in replicas:
            rank = each.group.rank()
            owners |= owners_in(each.group, self.replica(each.owner, each.name).parameters())
        return Ownership(rank, owners)

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer, as in a run without sharding; all ranks have to call this.

        Args:
            optimizer: the one that steps update.

        Returns:
            Its ``state_dict()`` with the states of all parameters, on the CPU, equal on all ranks. Eager DDP
            can load it, and so can `load_state_dict` on any number of ranks.

        Raises:
            UsageError: there is no process group.
        """
        return whole_state(optimizer.state_dict(), self._group)

    def load_state_dict(self, optimizer: Optimizer, state: dict[str, Any], *modules: nn.Module) -> None:
        """Load a whole state, of which each rank keeps its own part.

        Args:
            optimizer: the one that steps update.
            state: what `state_dict` returned, or ``state_dict()`` of an optimizer without sharding.
            modules: the outermost modules that steps train with it.

        Raises:
            UsageError: there is no process group.
        """
        optimizer.load_state_dict(state)
        divide(optimizer, self.shares([self.replica(module, "") for module in modules]))

    def optimizer_step(self, shares: Callable[[], Ownership | None]) -> Callable[..., Any]:
        """A step that updates this rank's parameters."""
        return traced(shares)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlainReplica(Replica):
    """A plain module in a step.

    Attributes:
        how: the group, and the limits of buckets.
    """

    how: Replicate

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.owner  # type: ignore[no-any-return]  # an attribute of Any

    @property
    def group(self) -> dist.ProcessGroup:
        """The given one, or all ranks.

        Raises:
            UsageError: there is no process group.
        """
        return self.how._group

    @property
    def device(self) -> torch.device:
        """The device of its parameters."""
        return next(iter(self.module.parameters())).device

    @property
    def transport(self) -> Transport:
        """As DDP's reducer sends."""
        return REDUCER

    @property
    def form(self) -> Sequence[tuple[str, Any]]:
        """Names, shapes and dtypes of parameters and buffers."""
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        return [(name, (tuple(each.shape), each.dtype)) for name, each in state]

    def parameters(self) -> list[Tensor]:
        """Its parameters, without those that DDP would ignore."""
        return self._without_ignored(self.module.named_parameters())

    def buffers(self) -> list[Tensor]:
        """Its buffers, without those that DDP would ignore."""
        return self._without_ignored(self.module.named_buffers())

    def _without_ignored(self, named: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
        ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
        return [each for name, each in named if name not in ignored]

    def specs(self) -> Sequence[ParamSpec]:
        """The parameters that require grad, without those that DDP would ignore."""
        return specs_from_module(self.module)

    def buckets(self, ready: Sequence[ParamSpec]) -> list[Placed]:
        """As DDP's reducer would fill them."""
        placed = ready_buckets(ready, self.how.limits)
        return [([ready[place] for place in places], reason) for places, reason in placed]


class EachAccumulation:
    """Averages each gradient before it is read."""

    only_if_read = True
    twice = "Call backward() once and add the losses, or set gradients to None where nothing reads them"

    def __init__(self, known: Known) -> None:
        self._known = known

    def forward(self, module: int, outputs: Sequence[Tensor], reached: Iterable[int]) -> None:
        """Nothing: a plain module has no reducer."""

    def backward(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def averaging(self, parameter: int) -> list[Averaged]:
        """What averages the gradient of a parameter; of modules that share it, one."""
        return [*{each.sent: each for each in self._known.get(parameter, ())}.values()]


class RunningReplicas:
    """What a compiled step of plain modules does besides its graph.

    Args:
        how: whether buffers are broadcast.
        replicas: the modules.
    """

    def __init__(self, how: Replicate, replicas: Sequence[Replica]) -> None:
        self._how = how
        self._owners = [(each.name, ref(each.owner)) for each in replicas]

    def replicas(self) -> Sequence["PlainReplica"]:
        """The modules; they take part in the step, so they are alive."""
        return [self._how.replica(owner(), name) for name, owner in self._owners]

    def used(self) -> Mapping[Any, frozenset[str]]:
        """Nothing: a rank that uses other parameters than its peers is refused."""
        return {}

    averaged = used

    def begin(self) -> None:
        """Make the replicas equal."""
        for each in self.replicas():
            state = state_of(each.owner)
            if each.group.group_name not in state.replicated:
                broadcast([*each.parameters(), *each.buffers()], each.group)
                state.replicated.add(each.group.group_name)
            elif self._how.broadcast_buffers:
                broadcast(each.buffers(), each.group)

    def end(self) -> None:
        """Nothing."""
