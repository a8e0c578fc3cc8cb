"""The numbers that a step leaves: each with a name, what it depends on, and hence the levels that judge it.

A level follows from what a number depends on, from the backend, and from whether a sum over ranks has one
order only.

Invariant: every number has a level; and whatever a step leaves is listed here, except integers and counts,
which the structure (`ddpopt.judge.judging.structure`) compares as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from ddpopt.judge.compare import dense
from ddpopt.judge.judging.record import Record, Step
from ddpopt.judge.visible import GRADIENT_OF, KEPT

BUFFER = "buffer "
PARAMETER = "parameter "
FINAL = "final gradient of "
SEEN = "the "
"""Prefix of what else a script can see of a step: the loss, and what an option leaves."""
LOSS = f"{SEEN}loss"


class Kind(Enum):
    """What a number depends on."""

    FORWARD = (
        "this rank's forward: the loss, outputs, buffers, what an option leaves before the backward is over"
    )
    OWN = "this rank's backward: gradients of inputs, and of tensors outside of DDP"
    GRADIENT = "the sum over ranks"
    FINISHED = "all gradients: what hooks keep, what an option makes of them before the optimizer takes them"
    PARAMETER = "the parameter before the step, and the gradient that the optimizer takes"


@dataclass(frozen=True)
class Number:
    """One number of one step, as it was left on two sides.

    Attributes:
        step: index of the step.
        name: of a parameter for its gradient; else with a prefix.
        kind: what it depends on.
        got: of the mode.
        eager: of eager DDP, of the same shape and dtype.
    """

    step: int
    name: str
    kind: Kind
    got: Tensor
    eager: Tensor

    @property
    def plain(self) -> str:
        """The name of the parameter or buffer alone."""
        return plain(self.name)


def plain(name: str) -> str:
    """Take the prefix from a number's name.

    >>> plain("final gradient of layer.weight"), plain("layer.weight"), plain("the loss")
    ('layer.weight', 'layer.weight', 'the loss')
    """
    for word in (BUFFER, PARAMETER, FINAL):
        name = name.removeprefix(word)
    return name


def left_behind(one: Step) -> dict[str, tuple[Kind, Tensor]]:
    """List what one step left, by name.

    Args:
        one: the step, or the evaluation.

    Returns:
        Each number with what it depends on; gradients that are None are left out.
    """
    found = {name: (Kind.GRADIENT, tensor) for name, tensor in one.gradients.items() if tensor is not None}
    for name, value in seen(one).items():
        if isinstance(value, Tensor):
            found[name] = (_kind(one, name), value)
    for name, tensor in one.state.items():
        if name in one.gradients:
            found[PARAMETER + name] = (Kind.PARAMETER, tensor)
        elif is_rounded(tensor):
            found[BUFFER + name] = (Kind.FORWARD, tensor)
    return found


def seen(one: Step) -> dict[str, Any]:
    """List what a script can see of a step next to parameters, buffers and their gradients, by name."""
    final = {FINAL + name: tensor for name, tensor in one.final.items()}
    return final | {LOSS: one.loss} | {SEEN + name: value for name, value in one.extras.items()}


def _kind(one: Step, name: str) -> Kind:
    bare = name.removeprefix(SEEN)
    if bare.startswith(GRADIENT_OF):
        return Kind.OWN
    is_late = bare in one.late or bare.startswith((KEPT, FINAL))
    return Kind.FINISHED if is_late else Kind.FORWARD


def is_rounded(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()


def pairs(record: Record, eager: Record) -> Iterator[Number]:
    """Yield all numbers of all steps that both sides have in the same form; L3 finds the others."""
    for step, (got, expected) in enumerate(zip(record.moments, eager.moments, strict=False)):
        mine = left_behind(got)
        for name, (kind, tensor) in left_behind(expected).items():
            if name in mine and _alike(mine[name][1], tensor):
                yield Number(step, name, kind, mine[name][1], tensor)


def _alike(got: Tensor, expected: Tensor) -> bool:
    return dense(got).shape == dense(expected).shape and got.dtype == expected.dtype


@dataclass(frozen=True)
class Rules:
    """What may be asked of the numbers of a trial; the same on every rank.

    Attributes:
        exact: whether operations run as in eager, in its order.
        ordered: whether a sum over ranks has one order only.
        means: whether gradients are means of what each rank computes alone, and that is known.
        shards: whether norms are computed over shards, hence in another order.
        finishes: whether an option changes gradients before the optimizer takes them.
        ignored: names of parameters that DDP leaves alone, and no other reducer takes: each rank keeps its
            own gradient.
        unstable: names of what eager does not reproduce.
        written: names of parameters that something else than the optimizer writes to.
        resummed: names of what is not equal, and may be summed in another order.
    """

    exact: bool
    ordered: bool
    means: bool
    shards: bool = False
    finishes: bool = False
    ignored: frozenset[str] = frozenset()
    unstable: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    resummed: frozenset[str] = frozenset()

    def sums(self, kind: Kind, name: str) -> bool:
        """Whether a number is a gradient or computed from one: not what the optimizer makes of its own."""
        return kind is not Kind.FORWARD and (kind is not Kind.PARAMETER or plain(name) in self.written)

    def levels(self, kind: Kind, name: str) -> tuple[str, ...]:
        """The levels that judge a number.

        Args:
            kind: what it depends on.
            name: of the number.

        Returns:
            At least one. A parameter at L0 is compared with what the optimizer makes of its own gradient,
            which is judged itself; what eager does not reproduce is left to L2.
        """
        equal = self.exact and self.ordered
        if kind is Kind.PARAMETER and plain(name) not in self.written:
            return ("L0",)
        if plain(name) in self.unstable or name in self.resummed:
            return ("L2",)
        if kind in (Kind.FORWARD, Kind.OWN) or (kind is Kind.GRADIENT and name in self.ignored):
            return ("L0",) if self.exact else ("L2",)
        if kind is Kind.GRADIENT and self.exact and self.means:
            return ("L0", "L1") if self.ordered else ("L1",)
        if kind is Kind.FINISHED and self.shards:
            return ("L2",)
        return ("L0",) if equal else ("L2",)

    @property
    def need_rounding(self) -> bool:
        """Whether anything may come to be judged at L2."""
        if not self.exact or self.unstable or self.resummed or (self.shards and self.finishes):
            return True
        return not self.ordered and (not self.means or self.finishes or bool(self.written))
