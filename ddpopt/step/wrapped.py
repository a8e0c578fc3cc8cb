"""Steps of modules that are wrapped in DDP, which say how they are data-parallel.

Invariant: a step does to the reducer of each module what DDP's iterations would, as far as anyone sees it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.impose import imposed_plan
from ddpopt.ddp.ready_hooks import users_hooks
from ddpopt.ddp.specs import limits_of, specs_from_ddp
from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.planning.bucket_rule import ParamSpec, initial_buckets, ready_buckets
from ddpopt.planning.plan import Plan
from ddpopt.step.joining import begin, end, is_joining, reducers_buckets
from ddpopt.step.parallel import Own, Parallel
from ddpopt.step.reductions import Met, Reductions
from ddpopt.step.replicas import Known, Placed, Replica
from ddpopt.step.settings import INSTEAD, WHAT
from ddpopt.step.transport import Transport, transport_of

FIRST = "as in DDP's first iteration, which keeps these buckets where it looks for unused parameters"
JOINED = "as in DDP's reducer, whose buckets ranks that have joined send too"
"""Why a bucket ends where it does, if not by the ready order."""
Asked = Sequence[tuple[str, Sequence[Callable[[], bool]]]]
"""The name of each parameter, and what `users_hooks` returned for it."""
ReadOf = tuple[Plan | None, str, Transport | None]
"""A DDP module's imposed plan, the name of its process group, and how it sends gradients."""


class DdpReplica(Replica):
    """A DDP module in a step."""

    @property
    def module(self) -> nn.Module:
        """The module that DDP wraps."""
        inner: nn.Module = self.owner.module
        return inner

    @property
    def group(self) -> dist.ProcessGroup:
        """DDP's own."""
        return self.owner.process_group  # type: ignore[no-any-return]  # an attribute of Any

    @property
    def device(self) -> torch.device:
        """DDP's own."""
        return self.owner.device  # type: ignore[no-any-return]  # an attribute of Any

    @property
    def transport(self) -> Transport | None:
        """As its reducer sends, or a hook of torch's; None for any other hook."""
        return transport_of(self.owner)

    @property
    def looks_for_unused(self) -> bool:
        """Whether DDP looks in each iteration for parameters that are not used, on any rank."""
        return bool(self.owner.find_unused_parameters and not self.owner.static_graph)

    @property
    def is_joining(self) -> bool:
        """Whether it is used under ``join()``."""
        return is_joining(self.owner)

    def specs(self) -> Sequence[ParamSpec]:
        """The parameters of its reducer."""
        require_plain_ddp(self.name, self.owner)
        parameters = {id(each) for each in self.module.parameters()}
        if not {*map(id, self.owner._module_parameters)} <= parameters:
            raise UsageError(f"{WHAT}: parameters of {self.name} were replaced; wrap it in DDP again")
        return specs_from_ddp(self.owner)

    def buckets(self, ready: Sequence[ParamSpec]) -> list[Placed]:
        """As its reducer fills them, or those of an imposed plan."""
        if self.is_joining:
            return [(specs, JOINED) for specs in reducers_buckets(self.owner)]
        looks = self.looks_for_unused
        sent = specs_from_ddp(self.owner) if looks else ready  # DDP then sends zeros for the others
        imposed = imposed_plan(self.owner)
        if imposed is not None:
            by_name = {spec.name: spec for spec in sent}
            found = [
                ([by_name[name] for name in bucket.params if name in by_name], bucket.reason)
                for bucket in imposed.buckets
            ]
            return [(specs, reason) for specs, reason in found if specs]
        limits = limits_of(self.owner)
        if looks:  # each rank has another ready order, so DDP keeps its first buckets
            placed = [(places, FIRST) for places in initial_buckets(sent, limits)]
        else:
            placed = ready_buckets(sent, limits)
        return [([sent[place] for place in places], reason) for places, reason in placed]


def require_plain_ddp(name: str, ddp: Any) -> None:
    """Check that a module has no options that a step does not know; raises UnsupportedError."""
    problems = {
        "a communication hook that is none of torch's default ones": transport_of(ddp) is None,
        "mixed_precision": ddp.mixed_precision is not None,
        "a buffer hook": hasattr(ddp, "buffer_hook"),
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
    }
    if wrong := [what for what, there in problems.items() if there]:
        raise UnsupportedError(f"{WHAT} does not support that {name} uses {' and '.join(wrong)}; {INSTEAD}")


def require_no_node_hooks(asked: Asked) -> None:
    """Check that no AccumulateGrad node has hooks of a user; raises UnsupportedError."""
    for name, kinds in asked:
        if any(has_hooks() for has_hooks in kinds):
            raise UnsupportedError(
                f"{WHAT} does not support hooks on the AccumulateGrad node of {name}; {INSTEAD}"
            )


class Wrapped(Parallel):
    """DDP modules, each with the options that it was built with; of one step function."""

    kind = DistributedDataParallel

    def __init__(self) -> None:
        self._begun: set[int] = set()

    def forget(self) -> None:
        """Begin another step."""
        self._begun.clear()

    def replica(self, owner: Any, name: str) -> Replica:
        """What a step reads of a DDP module."""
        return DdpReplica(name, owner)

    def replicas(self, called: Sequence[Replica], near: Own, inputs: Sequence[Any]) -> tuple[Replica, ...]:
        """The DDP modules that the step calls."""
        del near, inputs
        if not called:
            raise UsageError(
                f"{WHAT}: expected that the step calls a DistributedDataParallel module, and it calls none; "
                "wrap the model in DDP first, or pass parallel=ddpopt.Replicate()"
            )
        return (*called,)

    def averaging(
        self,
        known: Known,
        replicas: Sequence[Replica],
        forwards: Mapping[int, int],
    ) -> Reductions:
        """What the reducers would average."""
        return Reductions(known, replicas, forwards)

    def running(self, replicas: Sequence[Replica], averaging: Reductions) -> "RunningDdp":
        """Keep the state of reducers and joins."""
        return RunningDdp(replicas, averaging.met(), self._begun)

    def reading(self, owner: Any) -> ReadOf:
        """Its imposed plan, group and transport."""
        return imposed_plan(owner), owner.process_group.group_name, transport_of(owner)

    def joining(self, owners: Iterable[Any]) -> frozenset[int]:
        """Those under ``join()`` whose reducers have rebuilt their buckets."""
        return frozenset(id(ddp) for ddp in owners if is_joining(ddp) and ddp._has_rebuilt_buckets)


class RunningDdp:
    """What a compiled step does to the reducers of its DDP modules.

    Args:
        replicas: the modules.
        met: what the step does to each.
        begun: ``id`` of the modules for which this step has sent what goes before a forward.
    """

    def __init__(self, replicas: Sequence[Replica], met: Sequence[Met], begun: set[int]) -> None:
        self._met = met
        self._begun = begun
        self._asked = [
            (f"{each.name}.module.{name}", users_hooks(parameter))
            for each in replicas
            for name, parameter in each.module.named_parameters()
            if parameter.requires_grad
        ]

    def replicas(self) -> Sequence[Replica]:
        """The modules; options and hooks may be new."""
        found = [DdpReplica(each.name, each.ddp()) for each in self._met]
        for each in found:
            require_plain_ddp(each.name, each.owner)
        require_no_node_hooks(self._asked)
        for met in self._met:
            met.require_nothing_left()
        return found

    def used(self) -> Mapping[Any, frozenset[str]]:
        """The parameters on which outputs depend."""
        return {each.ddp(): each.here for each in self._met}

    def averaged(self) -> Mapping[Any, frozenset[str]]:
        """The parameters that are reduced."""
        return {each.ddp(): each.reduced for each in self._met}

    def begin(self) -> None:
        """Send what DDP sends before a forward under ``join()``, once in a step."""
        for ddp in self._joining():
            if id(ddp) not in self._begun:
                self._begun.add(id(ddp))
                begin(ddp)
        for each in self._met:
            each.remember()

    def end(self) -> None:
        """Tell reducers under ``join()`` that gradients have arrived."""
        for ddp in self._joining():
            end(ddp)

    def _joining(self) -> list[Any]:
        ddps: list[Any] = [each.ddp() for each in self._met]
        return [ddp for ddp in ddps if is_joining(ddp)]
