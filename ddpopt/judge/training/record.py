"""The results of a training run, on which two modes must agree, and its numbers, each with its levels.

A level follows from what a number depends on, from the backend, and from whether a sum over ranks has only
one order. Invariant: every number has a level, and everything that a step leaves is listed here, except
integers and counts, which `ddpopt.judge.rules.structure` compares directly.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torch import Tensor

from ddpopt.judge.compare import dense
from ddpopt.judge.engines.engine import Gradients, Named, full
from ddpopt.judge.training.memory import Pairs
from ddpopt.judge.training.visible import ATTRIBUTE, GRADIENT_OF, KEPT, OUTSIDE
from ddpopt.observation.events import Collective, Iteration
from ddpopt.planning.plan import Plan

BUFFER = "buffer "
PARAMETER = "parameter "
FINAL = "final gradient of "
STATE = "optimizer state "
SEEN = "the "
"""Prefix of other visible values of a step: the loss, and values that an option adds."""
LOSS = f"{SEEN}loss"


@dataclass
class RecordedStep:
    """The results of one step, or of what was run after all steps.

    Attributes:
        moment: when it was: ``"step 0"``, ``"the evaluation"``, or the name of an extra step.
        loss: the detached loss; the last one if a step has several.
        gradients: the gradients after the last backward, before anything changes them.
        state: parameters and buffers after the optimizer.
        random: states of the default generators after the backward, of the CPU and of the device.
        extras: other values that a training script can see (`ddpopt.judge.training.visible`), and values
            that the option adds to the comparison.
        final: the gradients that the optimizer takes, if the option changes them after the backward; else
            empty.
        late: names of the extras that the option left after the backward.
        sharing: pairs of names that share memory; None if the reducer has no part in that.
        written: values that a script may have kept from the previous step and that this one wrote to.
        optimizer: the state of the optimizer after the step, such as ``"momentum_buffer of layer.weight"``.
        sent: the collectives of an evaluation, or of what needs no gradients in an extra step.
    """

    moment: str
    loss: Tensor | None
    gradients: Gradients
    state: Named
    random: Tensor
    extras: dict[str, Any] = field(default_factory=dict)
    final: Gradients = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    sharing: Pairs | None = None
    written: tuple[str, ...] = ()
    optimizer: Named = field(default_factory=dict)
    sent: tuple[str, ...] = ()

    @property
    def taken(self) -> Gradients:
        """The gradients that the optimizer takes."""
        return self.final or self.gradients


def unreduced(name: str) -> str:
    """The name, among the extras, of a parameter's unreduced gradient."""
    return f"{GRADIENT_OF}{name} under no_sync"


def in_sight(name: str, eager: RecordedStep) -> bool:
    """Whether a script can see this value: not a leaf or attribute internal to compiled code."""
    _, outside, rest = name.partition(OUTSIDE)
    if outside:
        return f"{GRADIENT_OF}{OUTSIDE}{rest}" in eager.extras
    _, attribute, rest = name.partition(f"{KEPT}{ATTRIBUTE}")
    return not attribute or f"{attribute}{rest}" in eager.extras


@dataclass
class Record:
    """The results of a run.

    Attributes:
        start: parameters and buffers before the first step.
        follow: parameters and buffers that each step started from, in order; None if each continued from the
            previous one.
        steps: the steps in order; ranks may have different numbers of them.
        evaluation: the model's output after the last step, in evaluation mode and without gradients; None if
            eager DDP cannot do that.
        extras: the extra steps after that, by name.
        graphs: Dynamo's compile ids, in order.
        graphs_after: number of graphs after each step.
        given_up: how many functions Dynamo stopped compiling because it had compiled them too often.
        captures: the number of backwards that compiled autograd captured.
        iterations: the synchronized backwards, if DDP's reducer could be observed.
        collectives: all collectives on the DDP module's process group, in order, if they were observed.
        elsewhere: collectives on other process groups.
        ignored: names of parameters and buffers that DDP ignores.
        planned: whether ddpopt's plan should be in force.
        plan: ddpopt's plan in force at the end, if there is one.
        local: the last step repeated from the same state without reduction; its gradients are extras. None if
            it was not requested.
        sent: the collectives of each step, if the mode has no reducer to observe.
        promised: how many collectives of each kind the engine promises for a step.
        checkpoint: what the run left for another one to go on from, if the option resumes.
        unjudged: what could not be recorded, with the reason.
        foreign: collectives in a process group that the engine was not given.
        recipe: the optimizer that updated the parameters; None for plain SGD without one.
        captures_step: whether forward and backward are one graph, which an extra step does not run.
        captures_update: whether the optimizer is a part of that graph.
        growth: the bytes of tensors that each further step kept at least; None if none was taken.
    """

    start: Named
    follow: Sequence[Named] | None = None
    steps: list[RecordedStep] = field(default_factory=list)
    evaluation: RecordedStep | None = None
    graphs: tuple[str, ...] = ()
    graphs_after: list[int] = field(default_factory=list)
    given_up: int = 0
    captures: int = 0
    iterations: tuple[Iteration, ...] | None = None
    collectives: tuple[Collective, ...] = ()
    elsewhere: tuple[Collective, ...] = ()
    ignored: frozenset[str] = frozenset()
    planned: bool = False
    plan: Plan | None = None
    local: RecordedStep | None = None
    sent: list[tuple[str, ...]] = field(default_factory=list)
    promised: Mapping[str, int] | None = None
    checkpoint: Any = None
    unjudged: tuple[str, ...] = ()
    extras: dict[str, RecordedStep] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()
    recipe: Any = None
    captures_step: bool = False
    captures_update: bool = False
    growth: int | None = None

    def continued(self, other: "Record") -> "Record":
        """This run and the one that went on from it."""
        counts = [*self.graphs_after, *(len(self.graphs) + count for count in other.graphs_after)]
        parts = ("steps", "graphs", "given_up", "captures", "collectives", "elsewhere", "sent", "unjudged")
        joined = {part: getattr(self, part) + getattr(other, part) for part in parts}
        if self.iterations is not None and other.iterations is not None:
            joined["iterations"] = self.iterations + other.iterations
        return replace(other, start=self.start, graphs_after=counts, **joined)

    @property
    def moments(self) -> list[RecordedStep]:
        """The steps, the evaluation after them, the extra steps, and the last step under no_sync."""
        others = (self.evaluation, *self.extras.values(), self.local)
        return [*self.steps, *(one for one in others if one is not None)]

    def beside(self, eager: "Record") -> Iterator[tuple[int, RecordedStep, RecordedStep]]:
        """Each moment that both runs have: its place among eager's, this run's, and eager's."""
        own = {one.moment: one for one in self.moments}
        for place, one in enumerate(eager.moments):
            if one.moment in own:
                yield place, own[one.moment], one

    @property
    def starts(self) -> list[Named]:
        """Parameters and buffers before each step and after the last."""
        own = [self.start, *(step.state for step in self.steps)]
        return own if self.follow is None else [*self.follow[: len(self.steps)], own[-1]]


def buckets_of(record: Record) -> dict[str, int]:
    """The bucket that carried each parameter in the last synchronized backward."""
    last = record.iterations[-1].buckets if record.iterations else ()
    return {name: bucket.index for bucket in last for name in bucket.params}


class NumberKind(Enum):
    """What a number depends on."""

    FORWARD = (
        "this rank's forward: the loss, outputs, buffers, and what an option records before backward ends"
    )
    OWN = "this rank's backward: gradients of inputs, and of tensors outside DDP"
    GRADIENT = "the sum over ranks"
    FINISHED = "all gradients: what hooks record, and what an option makes of them before the optimizer runs"
    PARAMETER = "the parameter before the step, and the gradient that the optimizer uses"


@dataclass(frozen=True)
class Number:
    """One number of one step, on both sides of a comparison.

    Attributes:
        step: place of the moment among those of eager's run, which begin with the steps.
        moment: when it was.
        name: the parameter's name for a gradient; else a name with a prefix.
        kind: what it depends on.
        got: the value in the mode.
        eager: the value in eager DDP, of the same shape and dtype.
        is_extra: whether it is of an extra step, for which the sums over ranks are not known.
    """

    step: int
    moment: str
    name: str
    kind: NumberKind
    got: Tensor
    eager: Tensor
    is_extra: bool = False

    @property
    def label(self) -> str:
        """Its name, with the extra step that it is of."""
        return labeled(self.name, self.moment, is_extra=self.is_extra)

    @property
    def key(self) -> str:
        """Its name among the numbers that eager does not reproduce; extra steps count on their own."""
        return labeled(plain(self.name), self.moment, is_extra=self.is_extra)


def labeled(name: str, moment: str, *, is_extra: bool) -> str:
    """The name of a number, with the extra step that it is of."""
    return f"{moment}: {name}" if is_extra else name


def plain(name: str) -> str:
    """Remove the prefix from a number's name.

    >>> plain("final gradient of layer.weight"), plain("layer.weight"), plain("the loss")
    ('layer.weight', 'layer.weight', 'the loss')
    """
    for word in (BUFFER, PARAMETER, FINAL):
        name = name.removeprefix(word)
    return name


def left_behind(one: RecordedStep) -> dict[str, tuple[NumberKind, Tensor]]:
    """List the results of one step, by name.

    Args:
        one: the step, or the evaluation.

    Returns:
        Each number with what it depends on; gradients that are None are left out.
    """
    found = {name: (NumberKind.GRADIENT, g) for name, g in one.gradients.items() if g is not None}
    for name, value in seen(one).items():
        if isinstance(value, Tensor):
            found[name] = (_kind(one, name), value)
    for name, tensor in one.state.items():
        if name in one.gradients:
            found[PARAMETER + name] = (NumberKind.PARAMETER, tensor)
        elif is_rounded(tensor):
            found[BUFFER + name] = (NumberKind.FORWARD, tensor)
    return found


def seen(one: RecordedStep) -> dict[str, Any]:
    """List, by name, what a script can see of a step besides parameters, buffers and their gradients."""
    final = {FINAL + name: tensor for name, tensor in one.final.items()}
    return final | {LOSS: one.loss} | {SEEN + name: value for name, value in one.extras.items()}


def _kind(one: RecordedStep, name: str) -> NumberKind:
    bare = name.removeprefix(SEEN)
    if bare.startswith(GRADIENT_OF):
        return NumberKind.OWN
    is_late = bare in one.late or bare.startswith((KEPT, FINAL))
    return NumberKind.FINISHED if is_late else NumberKind.FORWARD


def optimizer_state(optimizer: Any, parameters: Iterable[tuple[str, Tensor]]) -> Named:
    """The tensors in an optimizer's state, by their key and the parameter's name.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or an object that has its ``state``.
        parameters: the parameters, each with its name.
    """
    held = getattr(optimizer, "state", {})
    if not isinstance(held, Mapping):
        return {}
    return {
        f"{key} of {name}": full(value).detach().clone()
        for name, parameter in parameters
        for key, value in (held.get(parameter) or {}).items()  # None for what another rank keeps
        if isinstance(value, Tensor)
    }


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()


def pairs(record: Record, eager: Record) -> Iterator[Number]:
    """Yield all numbers of all steps that both sides have in the same form; L3 reports the others."""
    for step, got, expected in record.beside(eager):
        mine = left_behind(got)
        for name, (kind, tensor) in left_behind(expected).items():
            if name in mine and alike(mine[name][1], tensor):
                is_extra = expected.moment in eager.extras
                yield Number(step, expected.moment, name, kind, mine[name][1], tensor, is_extra)


def alike(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors have the same shape and dtype, so that their numbers can be compared."""
    return dense(got).shape == dense(expected).shape and got.dtype == expected.dtype


@dataclass(frozen=True)
class Rules:
    """The checks that apply to the numbers of a trial; the same on every rank.

    Attributes:
        exact: whether operations run as in eager, in the same order.
        ordered: whether a sum over ranks has only one order.
        means: whether gradients are means of what each rank computes alone, and those values are known.
        shards: whether values computed from all gradients are computed over shards, hence in another order.
        ignored: names of parameters that DDP ignores and no other reducer handles: each rank keeps its own
            gradient.
        unstable: names of numbers that eager does not reproduce.
        written: names of parameters that something other than the optimizer writes to.
        resummed: labels of numbers that are not equal and may be summed in another order.
        compiled_update: whether compiled code, which rounds in its own way, updates the parameters.
    """

    exact: bool
    ordered: bool
    means: bool
    shards: bool = False
    ignored: frozenset[str] = frozenset()
    unstable: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    resummed: frozenset[str] = frozenset()
    compiled_update: bool = False

    def sums(self, kind: NumberKind, name: str) -> bool:
        """Whether a number is a gradient or computed from one, other than by the optimizer's own update."""
        updated = kind is NumberKind.PARAMETER and plain(name) not in self.written
        return kind is not NumberKind.FORWARD and not updated

    def levels(self, number: Number) -> tuple[str, ...]:
        """The levels that judge a number.

        Returns:
            At least one. A parameter is compared with the optimizer's update from the mode's own gradient,
            which is judged itself; numbers that eager does not reproduce are judged at L2.
        """
        kind = number.kind
        name = number.name
        equal = self.exact and self.ordered
        if kind is NumberKind.PARAMETER and plain(name) not in self.written:
            return ("L2",) if self.compiled_update else ("L0",)
        if number.key in self.unstable or number.label in self.resummed:
            return ("L2",)
        kept = kind is NumberKind.GRADIENT and name in self.ignored
        if kept or kind in (NumberKind.FORWARD, NumberKind.OWN):
            return ("L0",) if self.exact else ("L2",)
        if kind is NumberKind.GRADIENT and self.exact and self.means and not number.is_extra:
            return ("L0", "L1") if self.ordered else ("L1",)
        if kind is NumberKind.FINISHED and self.shards:
            return ("L2",)
        return ("L0",) if equal else ("L2",)
