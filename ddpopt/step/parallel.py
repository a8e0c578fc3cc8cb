"""How the modules of a step are data-parallel: a small protocol, of which each form is one class.

`ddpopt.step.wrapped.Wrapped` is for modules in DDP, which is the default; `ddpopt.step.replicate.Replicate`
is for plain ones.

Invariant: the ranks have compared their steps before anything here sends.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ddpopt.step.replicas import Averaged, Known, Replica

Own = Mapping[str, Any]
"""The modules that a step function can read, by the name that the user has for them."""


def outermost(near: Own) -> dict[str, Any]:
    """The modules that are in no other one."""
    inner = {id(each) for module in near.values() for each in [*module.modules()][1:]}
    return {name: module for name, module in near.items() if id(module) not in inner}


@dataclass(frozen=True)
class Ownership:
    """Which rank owns each parameter.

    Attributes:
        rank: this rank, in the group that trains the parameters.
        owners: the owner of each parameter, by its ``id``.
    """

    rank: int
    owners: Mapping[int, int]


class Averaging(Protocol):
    """Which accumulations of a step average their gradients, found while the step is recorded.

    Attributes:
        only_if_read: whether an accumulation averages nothing if only the parameter's next one reads it.
        twice: what to do instead of two accumulations of one parameter that average.
    """

    only_if_read: bool
    twice: str

    def forward(self, module: int, outputs: Sequence[Tensor], reached: Iterable[int]) -> None:
        """Note a forward of a DDP module after which it reduces."""

    def backward(self) -> None:
        """Note that a backward begins."""

    def averaging(self, parameter: int) -> list[Averaged]:
        """What averages the gradient that a parameter, given by its ``id``, gets now."""

    def finish(self) -> None:
        """Note that the step ends."""


class Running(Protocol):
    """What a compiled step does besides its graph. It keeps no module alive."""

    def replicas(self) -> Sequence[Replica]:
        """The modules, in the order of the step's plans, after a check that they may still run it."""

    def used(self) -> Mapping[Any, frozenset[str]]:
        """The parameters that this rank uses, of modules whose ranks ask each other for them."""

    def averaged(self) -> Mapping[Any, frozenset[str]]:
        """Those that the graph averages."""

    def begin(self) -> None:
        """Send what goes before the graph."""

    def end(self) -> None:
        """Note that the graph has run."""


class Parallel(ABC):
    """How the modules of a step are data-parallel.

    Attributes:
        kind: the class of the modules that a step trains.
    """

    kind: type[Any]

    @abstractmethod
    def replica(self, owner: Any, name: str) -> Replica:
        """What a step reads of a module."""

    @abstractmethod
    def replicas(self, called: Sequence[Replica], near: Own, inputs: Sequence[Any]) -> tuple[Replica, ...]:
        """The modules of a step.

        Args:
            called: the DDP modules that it calls.
            near: the modules of this kind that the step function can read.
            inputs: those of Dynamo's graph.

        Raises:
            UsageError: there is none, or one that cannot be used.
        """

    @abstractmethod
    def averaging(
        self,
        known: Known,
        replicas: Sequence[Replica],
        forwards: Mapping[int, int],
    ) -> Averaging:
        """Follow a step while it is recorded.

        Args:
            known: what each module averages, by ``id`` of the parameter.
            replicas: the modules of the step.
            forwards: how often each is called, by ``id``.
        """

    @abstractmethod
    def running(self, replicas: Sequence[Replica], averaging: Any) -> Running:
        """What the compiled step does besides its graph."""

    @abstractmethod
    def reading(self, owner: Any) -> Hashable:
        """What a graph is compiled for, of a module: a graph for something else is not used."""

    @abstractmethod
    def forget(self) -> None:
        """Begin another step."""

    def shares(self, replicas: Iterable[Replica]) -> Ownership | None:
        """Which rank owns each parameter of modules; None if all ranks update all."""
        del replicas
        return None

    def optimizer_step(self, shares: Callable[[], Ownership | None]) -> Callable[..., Any] | None:
        """An optimizer's step as Dynamo traces it; None for its own.

        Args:
            shares: finds, while Dynamo traces, the owners of the modules near the step.
        """
        del shares
        return None

    def joining(self, owners: Iterable[Any]) -> frozenset[int]:
        """``id`` of the modules whose next graph differs because reducers have rebuilt their buckets."""
        del owners
        return frozenset()
