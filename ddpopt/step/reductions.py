"""Which accumulations DDP would average: the state of each module's reducer while a step is recorded.

A synchronized forward arms a module's reducer. From then on each of its parameters is reduced with the first
gradient that it gets; when none is left the reducer is no longer armed, and gradients stay those of the rank.
With ``find_unused_parameters`` and ``static_graph`` it waits for one backward only, and with the first for no
parameter on which no output depends, on any rank. DDP's reducer decides in this way, too
(``Reducer::autograd_hook``).

Invariant: forwards and backwards of other modules change nothing for a module.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddpopt.ddp.state import state_of
from ddpopt.errors import UnsupportedError, UsageError
from ddpopt.step.joining import require_joinable
from ddpopt.step.replicas import Averaged, Known, Replica
from ddpopt.step.settings import INSTEAD, WHAT


@dataclass
class _Armed:
    """A reduction that has begun.

    Attributes:
        waiting: ``id`` of the parameters that will still be reduced.
        reduced: ``id`` of those that were.
    """

    waiting: set[int]
    reduced: set[int] = field(default_factory=set)


@dataclass
class _Left:
    """What the steps so far have left in the reducer of a module.

    Attributes:
        pending: a synchronized forward has armed it, and no backward followed.
        used: with ``find_unused_parameters``, the parameters with gradients that it has not reduced.
    """

    pending: bool = False
    used: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Met:
    """What a compiled step does to the reducer of a module, which this does not keep alive.

    Attributes:
        ddp: the module.
        name: as the user would write it.
        local: it gets a gradient before its first synchronized forward.
        begun: it has a synchronized forward.
        pending: such a forward has no backward.
        reduced: the parameters that are reduced.
        used: with ``find_unused_parameters``, those that get another gradient after that.
        here: with it, those on which the outputs of synchronized forwards depend on this rank.
    """

    ddp: ref[DistributedDataParallel]
    name: str
    local: bool
    begun: bool
    pending: bool
    reduced: frozenset[str]
    used: frozenset[str]
    here: frozenset[str]

    def require_nothing_left(self) -> None:
        """Check that earlier steps left nothing that DDP would reduce in this one.

        Raises:
            UsageError: they did.
        """
        left = self._left
        if self.local and left.pending:
            raise UsageError(
                f"{WHAT}: an earlier step called {self.name} and no backward followed, so DDP would reduce "
                "in this step's backward, although it is not synchronized; call it under torch.no_grad() or "
                "no_sync() there"
            )
        if self.reduced and left.used - self.reduced:
            _refuse_used(sorted(left.used - self.reduced), self.name)

    @property
    def _left(self) -> _Left:
        ddp: Any = self.ddp()  # it takes part in a step
        left: _Left | None = state_of(ddp).left_by_steps
        return left or _Left()

    def remember(self) -> None:
        """Keep for later steps what this one leaves."""
        before = self._left
        ddp: Any = self.ddp()
        state_of(ddp).left_by_steps = _Left(
            self.pending if self.begun else before.pending,
            self.used if self.reduced else self.used | before.used,
        )


def _refuse_used(names: Iterable[str], module: str) -> NoReturn:
    raise UsageError(
        f"{WHAT}: {', '.join(map(repr, names))} of {module} got a gradient of this rank alone, and no other "
        "in the backward that reduces, in which DDP with find_unused_parameters=True would average it; use "
        "them in that backward, too, or use ddpopt.compile(model)"
    )


class Reductions:
    """Follows forwards, backwards and accumulations of a step.

    Args:
        known: what each module averages, by ``id`` of the parameter.
        replicas: the DDP modules of the step.
        forwards: how often each is called, by ``id``.

    Attributes:
        begun: modules that had a synchronized forward.
        local: modules that got a gradient before that.
        pending: modules whose reduction has begun, and has reduced nothing, at the end of the step.
    """

    only_if_read = False
    twice = (
        "Call DDP once and add the losses, or use no_sync() for all backwards of a step but the last; before "
        "a backward of this rank alone, set gradients to None"
    )

    def __init__(
        self,
        known: Known,
        replicas: Iterable[Replica],
        forwards: Mapping[int, int],
    ) -> None:
        self.begun: set[Replica] = set()
        self.local: set[Replica] = set()
        self.pending: set[Replica] = set()
        self._used: dict[Replica, set[int]] = {}
        self._reduced: dict[Replica, set[int]] = {}
        self._reached: dict[Replica, set[int]] = {}
        self._here: dict[Replica, set[int]] = {}
        self._known = known
        self._forwards = forwards
        self._replicas = {id(replica.owner): replica for replica in replicas}
        self._names: dict[Replica, dict[int, str]] = {each: {} for each in self._replicas.values()}
        for key, averaged in known.items():
            for each in averaged:
                self._names[each.replica][key] = each.spec.name
        self._armed: dict[Replica, _Armed] = {}
        self._outputs: list[tuple[Replica, Tensor, int]] = []

    def forward(self, module: int, outputs: Sequence[Tensor], reached: Iterable[int]) -> None:
        """Note a synchronized forward.

        Args:
            module: ``id`` of the DDP module.
            outputs: the tensors that it returned.
            reached: ``id`` of the parameters that they depend on.
        """
        replica = self._replicas[module]
        waiting = {*self._names[replica]}
        if replica.owner.static_graph:
            self._reached[replica] = {*reached}
            self._outputs += [(replica, each, each._version) for each in outputs]
        elif replica.owner.find_unused_parameters:
            waiting &= {*reached}
            self._here.setdefault(replica, set()).update(waiting)
            somewhere = replica.used_somewhere or ()
            waiting |= {key for key, name in self._names[replica].items() if name in somewhere}
        self._armed[replica] = _Armed(waiting)
        self.begun.add(replica)

    def backward(self) -> None:
        """Note that another backward begins, and that what waited for one backward only is complete."""
        for replica in [*self._armed]:
            if self._armed[replica].reduced and _is_joint(replica):
                self._complete(replica)

    def averaging(self, parameter: int) -> list[Averaged]:
        """What averages the gradient that a parameter gets now; of modules that share a group, one.

        Args:
            parameter: its ``id``.

        Raises:
            UsageError: DDP itself would fail here, or in its next iteration.
        """
        running = [each for each in self._known.get(parameter, ()) if self._reduces(each, parameter)]
        return [*{each.sent: each for each in running}.values()]

    def _reduces(self, averaged: Averaged, parameter: int) -> bool:
        replica = averaged.replica
        if replica not in self.begun:
            self.local.add(replica)
        armed = self._armed.get(replica)
        if armed is None:
            self._keep_alone(averaged, parameter)
            return False
        if parameter not in armed.waiting:
            why = (
                "a second gradient"
                if parameter in armed.reduced
                else "a gradient, although the outputs of the module's last forward do not depend on it"
            )
            raise UsageError(
                f"{WHAT}: {averaged.spec.name!r} of {replica.name} gets {why}, before the module's gradients "
                "are complete, for which DDP fails; call the module once and add the losses"
            )
        armed.waiting.remove(parameter)
        armed.reduced.add(parameter)
        self._reduced.setdefault(replica, set()).add(parameter)
        if not armed.waiting:
            self._complete(replica)
        return True

    def _keep_alone(self, averaged: Averaged, parameter: int) -> None:
        """Note a gradient that stays this rank's own."""
        replica = averaged.replica
        if not replica.owner.static_graph:
            if replica.owner.find_unused_parameters:
                self._used.setdefault(replica, set()).add(parameter)
        elif parameter in self._reached.get(replica, set()) - self._reduced.get(replica, set()):
            raise UsageError(
                f"{WHAT}: {averaged.spec.name!r} of {replica.name} gets no gradient in the backward in which "
                "others of the module do, for which DDP with static_graph=True fails in its next iteration; "
                "add the losses"
            )

    def _complete(self, replica: Replica) -> None:
        armed = self._armed.pop(replica)
        left = self._used.pop(replica, set()) - armed.reduced
        if left:
            _refuse_used([self._names[replica][key] for key in left], replica.name)

    def met(self) -> list[Met]:
        """What the step does to each module, in the order in which they were given."""
        return [
            Met(
                ref(each.owner),
                each.name,
                each in self.local,
                each in self.begun,
                each in self.pending,
                self._named(each, self._reduced),
                self._named(each, self._used),
                self._named(each, self._here),
            )
            for each in self._replicas.values()
        ]

    def _named(self, replica: Replica, parameters: Mapping[Replica, set[int]]) -> frozenset[str]:
        return frozenset(self._names[replica][key] for key in parameters.get(replica, ()))

    def finish(self) -> None:
        """Note that the step ends.

        Raises:
            UsageError: a parameter got no gradient, so DDP would fail in its next iteration.
            UnsupportedError: the step writes to an output that DDP copies only in its first iteration, or is
                one that ranks under ``join()`` cannot repeat.
        """
        for replica, output, version in self._outputs:
            if output._version != version:
                raise UnsupportedError(
                    f"{WHAT}: the step writes to an output of {replica.name}, which DDP with "
                    f"static_graph=True copies in its first iteration only; write to a copy, or {INSTEAD}"
                )
        self.backward()
        for replica, armed in self._armed.items():
            if not armed.reduced:
                self.pending.add(replica)
                continue
            missing = [name for key, name in self._names[replica].items() if key in armed.waiting]
            raise UsageError(
                f"{WHAT}: {replica.name} got no gradient for {', '.join(map(repr, missing))}, so DDP would "
                "fail in the next step; build it with find_unused_parameters=True or static_graph=True"
            )
        replicas = [*self._replicas.values()]
        for replica in replicas:
            is_reduced = replica in self.begun - self.pending
            require_joinable(replica, replicas, self._forwards[id(replica.owner)], is_reduced=is_reduced)


def _is_joint(replica: Replica) -> bool:
    """Whether DDP joins the outputs, so that one backward through any of them completes a reduction."""
    return bool(replica.owner.find_unused_parameters or replica.owner.static_graph)
