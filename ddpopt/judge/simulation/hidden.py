"""What a simulation must not take for granted: state that it cannot see, and values that it does not know.

The first rank takes each step again. If something is different then, the program keeps state that is not
restored between ranks. With every reduction multiplied, its gradients must be multiplied, too, and nothing
else: what else changes depends on values that other ranks would have sent. Invariant: both are named, and
what depends on them is not judged.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ddpopt.judge.compare import bitwise, dense
from ddpopt.judge.simulation.sequences import sent_in_words
from ddpopt.judge.simulation.shared_model import Taken
from ddpopt.judge.training.record import NumberKind, left_behind, pairs
from ddpopt.judge.verdict import Finding

FACTOR = 4.0
"""A power of 2, so that a product has no other rounding."""
RECEIVED = "what a reduction returns becomes the gradient, as in eager DDP"
STATE = (
    "the model keeps state that is not restored between simulated ranks: eager takes the first rank's step "
    "another way when it takes it again"
)
NOT_REPRODUCED = "eager leaves other values when the first rank takes its step again"
SHOWN = 4
VALUES = "what depends on values that other ranks send, which a simulation does not know"


def not_reproduced(again: Taken, eager: Taken) -> str:
    """What differs when eager takes a step again; empty if nothing does."""
    numbers = pairs(again.record, eager.record)
    names = [number.name for number in numbers if not bitwise(number.got, number.eager).right]
    return f"{NOT_REPRODUCED}: {', '.join(names[:SHOWN])}" if names else ""


def other_way(again: Taken, eager: Taken) -> bool:
    """Whether eager sends or leaves other things when it takes a step again."""
    if [one.launch for one in again.sent] != [one.launch for one in eager.sent]:
        return True
    first, second = (left_behind(taken.record.steps[0]) for taken in (eager, again))
    return first.keys() != second.keys()


def unknown(multiplied: Taken, eager: Taken) -> str:
    """What depends on values that other ranks send; empty if nothing but gradients does."""
    first, second = (left_behind(taken.record.steps[0]) for taken in (eager, multiplied))
    changed = list(_changed(first, second))
    if not changed:
        return ""
    in_forward = dict.fromkeys(sent_in_words(one) for one in eager.sent if one.where)
    senders = f": {', '.join(in_forward)}" if in_forward else ""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return f"{VALUES} ({changed[0]}{more}){senders}"


def _changed(
    first: dict[str, tuple[NumberKind, Tensor]], second: dict[str, tuple[NumberKind, Tensor]]
) -> Iterator[str]:
    """Names of numbers that are neither as before nor, if they are gradients, multiplied.

    What an option or an optimizer makes of gradients is left out: no rank has them before the last one has
    sent its own.
    """
    for name, (kind, value) in first.items():
        if kind in (NumberKind.FINISHED, NumberKind.PARAMETER):
            continue
        if name not in second:
            yield name
            continue
        other = second[name][1]
        is_multiplied = kind is NumberKind.GRADIENT and is_multiple(other, value)
        if not is_multiplied and not _equal(other, value):
            yield name


def is_multiple(other: Tensor, value: Tensor) -> bool:
    """Whether a value was multiplied."""
    return _equal(other, value * FACTOR)


def _equal(one: Tensor, other: Tensor) -> bool:
    left = dense(one)
    right = dense(other)
    return left.shape == right.shape and bool(torch.equal(left.nan_to_num(), right.nan_to_num()))


def not_received(step: int, eager: tuple[Taken, Taken], got: tuple[Taken, Taken]) -> Iterator[Finding]:
    """Gradients that eager multiplies with the reductions, and the mode does not.

    Args:
        step: index of the step.
        eager: eager's step, and the same with every reduction multiplied.
        got: the mode's.
    """
    plain, multiplied = (taken.record.steps[0].gradients for taken in eager)
    mine, mine_multiplied = (taken.record.steps[0].gradients for taken in got)
    for name, gradient in plain.items():
        other = multiplied.get(name)
        own = mine.get(name)
        own_other = mine_multiplied.get(name)
        if gradient is None or other is None or own is None or own_other is None:
            continue
        expected = own * FACTOR if is_multiple(other, gradient) else own
        if not _equal(own_other, expected):
            message = f"step {step}: the gradient of {name} does not follow from what its reduction returns"
            yield Finding("L3", RECEIVED, message, rank=0, step=step, parameter=name)
