"""What a training run leaves: plain data, on which two modes must agree.

Invariant: equal cases, options and modes give equal records, but for what a machine does not reproduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddpopt.judge.parallel import Gradients, Named
from ddpopt.judge.visible import ATTRIBUTE, GRADIENT_OF, KEPT, OUTSIDE, Pairs
from ddpopt.observation.observe import Collective, Iteration
from ddpopt.planning.plan import Plan


@dataclass
class Step:
    """What one step left, or an evaluation after all steps, which has neither loss nor gradients.

    Attributes:
        loss: detached; the last one, where a step has several.
        gradients: after the last backward, before anything is done to them.
        state: parameters and buffers after the optimizer.
        random: states of the default generators after the backward, of the CPU and of the device.
        extras: what else a training script can see (`ddpopt.judge.visible`), and what the option wants to be
            equal too.
        final: the gradients that the optimizer takes, where the option changes them after the backward;
            empty where it does not.
        late: names of the extras that the option left after the backward.
        sharing: what shares memory, in pairs; None where that is not the reducer's business.
        written: what a script may have kept of the step before, and that this one wrote to.
    """

    loss: Tensor | None
    gradients: Gradients
    state: Named
    random: Tensor
    extras: dict[str, Any] = field(default_factory=dict)
    final: Gradients = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    sharing: Pairs | None = None
    written: tuple[str, ...] = ()

    @property
    def taken(self) -> Gradients:
        """The gradients that the optimizer takes."""
        return self.final or self.gradients


def unreduced(name: str) -> str:
    """The name among the extras of a parameter's gradient that nothing reduced."""
    return f"{GRADIENT_OF}{name} under no_sync"


def in_sight(name: str, eager: Step) -> bool:
    """Whether a script can see what bears a name: no leaf or attribute that compiled code has of its own."""
    _, outside, rest = name.partition(OUTSIDE)
    if outside:
        return f"{GRADIENT_OF}{OUTSIDE}{rest}" in eager.extras
    _, attribute, rest = name.partition(f"{KEPT}{ATTRIBUTE}")
    return not attribute or f"{attribute}{rest}" in eager.extras


@dataclass
class Record:
    """What a run left.

    Attributes:
        start: parameters and buffers before the first step.
        follow: parameters and buffers that each step started from, in order; None where each went on from the
            one before.
        steps: in order; ranks may have different numbers of them.
        evaluation: what the model returns after the last step, in evaluation mode and without gradients; None
            where eager DDP cannot do that.
        graphs: Dynamo's compile ids, in order.
        graphs_after: number of graphs after each step.
        captures: how many backwards compiled autograd captured.
        iterations: the synchronised backwards, where DDP's reducer could be observed.
        collectives: all that were sent on the DDP module's process group, in order, where they were observed.
        elsewhere: those sent on other process groups.
        ignored: names of parameters and buffers that DDP ignores.
        planned: whether ddpopt's plan is to be in force.
        plan: ddpopt's plan in force at the end, if there is one.
        local: the last step once more, from the same state, which nothing reduced: its gradients are extras;
            None if it was not asked for.
    """

    start: Named
    follow: Sequence[Named] | None = None
    steps: list[Step] = field(default_factory=list)
    evaluation: Step | None = None
    graphs: tuple[str, ...] = ()
    graphs_after: list[int] = field(default_factory=list)
    captures: int = 0
    iterations: tuple[Iteration, ...] | None = None
    collectives: tuple[Collective, ...] = ()
    elsewhere: tuple[Collective, ...] = ()
    ignored: frozenset[str] = frozenset()
    planned: bool = False
    plan: Plan | None = None
    local: Step | None = None

    @property
    def moments(self) -> list[Step]:
        """The steps, the evaluation after them, and the last step under no_sync."""
        return [*self.steps, *(one for one in (self.evaluation, self.local) if one is not None)]

    @property
    def starts(self) -> list[Named]:
        """Parameters and buffers before each step, and after the last."""
        own = [self.start, *(step.state for step in self.steps)]
        return own if self.follow is None else [*self.follow[: len(self.steps)], own[-1]]


def buckets_of(record: Record) -> dict[str, int]:
    """The bucket that carried each parameter in the last synchronised backward."""
    last = record.iterations[-1].buckets if record.iterations else ()
    return {name: bucket.index for bucket in last for name in bucket.params}
