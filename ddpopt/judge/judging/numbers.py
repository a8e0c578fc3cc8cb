"""The numbers that a step leaves behind: each with a name, and with what it depends on.

Invariant: whatever a step leaves behind is listed here, but for integers and counts, which the structure
(`ddpopt.judge.judging.structure`) compares as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from ddpopt.judge.compare import dense
from ddpopt.judge.judging.record import Record, Step, in_sight
from ddpopt.judge.verdict import Finding
from ddpopt.judge.visible import GRADIENT_OF, KEPT

LOSS = "the loss"
BUFFER = "buffer "
PARAMETER = "parameter "
FINAL = "final gradient of "
SEEN = "the "
"""In front of what else a script can see of a step, and of what an option leaves behind."""


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
    """One number of one step, as it was left behind on two sides.

    Attributes:
        step: index of the step.
        name: of a parameter for its gradient; else with a word in front.
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
    """Take the word in front from a number's name.

    >>> plain("final gradient of layer.weight"), plain("layer.weight"), plain("the loss")
    ('layer.weight', 'layer.weight', 'the loss')
    """
    for word in (BUFFER, PARAMETER, FINAL):
        name = name.removeprefix(word)
    return name


def left_behind(one: Step) -> dict[str, tuple[Kind, Tensor]]:
    """List what one step left behind, by name.

    Args:
        one: the step, or the evaluation.

    Returns:
        Each number with what it depends on; gradients that are None are left out.
    """
    found = {name: (Kind.GRADIENT, tensor) for name, tensor in one.gradients.items() if tensor is not None}
    if one.loss is not None:
        found[LOSS] = (Kind.FORWARD, one.loss)
    for name, tensor in one.final.items():
        if tensor is not None:
            found[FINAL + name] = (Kind.FINISHED, tensor)
    for name, extra in one.extras.items():
        if isinstance(extra, Tensor):
            found[SEEN + name] = (_kind(one, name), extra)
    for name, tensor in one.state.items():
        if name in one.gradients:
            found[PARAMETER + name] = (Kind.PARAMETER, tensor)
        elif is_rounded(tensor):
            found[BUFFER + name] = (Kind.FORWARD, tensor)
    return found


def _kind(one: Step, name: str) -> Kind:
    if name.startswith(GRADIENT_OF):
        return Kind.OWN
    return Kind.FINISHED if name in one.late or name.startswith(KEPT) else Kind.FORWARD


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


def unpaired(record: Record, eager: Record, rank: int) -> Iterator[Finding]:
    """Yield what else a script can see on one side only, or in another form.

    The structure looks at gradients, the loss, parameters and buffers itself.
    """
    for step, (got, expected) in enumerate(zip(record.moments, eager.moments, strict=False)):
        mine, theirs = _besides(got), _besides(expected)
        for name in sorted(mine.keys() | theirs.keys()):
            has, wants = _form(mine.get(name)), _form(theirs.get(name))
            if has != wants and in_sight(name, expected):
                message = f"step {step}: {name} is {has}, in eager DDP {wants}"
                claim = "what a script can see is of eager DDP's form"
                yield Finding("L3", claim, message, rank=rank, step=step, parameter=plain(name))


def _besides(one: Step) -> dict[str, Tensor]:
    found = left_behind(one)
    return {name: tensor for name, (_, tensor) in found.items() if name.startswith((FINAL, SEEN))}


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
