"""What eager's rounding does to each number of a step, learned from eager runs on neighbouring data.

Invariant: no datum is moved further than to the next number of the dtype that it is computed in, and zeros
stay zeros: `ddpopt.judge.judging.arithmetic.arithmetic_of` says why such a run is as right as the first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ddpopt.cases.case import Case
from ddpopt.judge.compare import Sum, exact
from ddpopt.judge.judging.arithmetic import Arithmetic, arithmetic_of
from ddpopt.judge.judging.numbers import Kind, is_rounded, left_behind, plain
from ddpopt.judge.judging.record import Record
from ddpopt.judge.option_cases import cast
from ddpopt.judge.parallel import Named

SAMPLES = 8
"""Eager steps from which eager's rounding is learned: one as it is, the others perturbed."""
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def perturbed(case: Case, number: int, computes: torch.dtype | None) -> Case:
    """Give a case neighbouring inputs. Whole numbers in them stay: they may be a mask, or places in a table.

    Args:
        case: the case.
        number: another one gives other neighbours.
        computes: the dtype that operations round to, if not that of their inputs.

    Returns:
        A case.
    """

    def inputs(rank: int, step: int) -> Any:
        generator = torch.Generator().manual_seed((number * 4096 + rank) * 4096 + step)
        return tree_map(lambda leaf: neighbour(leaf, generator, computes, data=True), case.inputs(rank, step))

    return replace(case, inputs=inputs)


def perturbed_state(state: Named, number: int, computes: torch.dtype | None) -> Named:
    """Neighbouring parameters and buffers, the same on every rank; arguments as for `perturbed`."""
    generator = torch.Generator().manual_seed(number)
    return {name: neighbour(tensor, generator, computes) for name, tensor in state.items()}


def neighbour(
    value: Any, generator: torch.Generator, computes: torch.dtype | None = None, *, data: bool = False
) -> Any:
    """Move every floating-point number by one unit in the last place, up or down.

    Args:
        value: a tensor; anything else is returned as it is.
        generator: draws the directions.
        computes: the dtype whose unit it is, where that is coarser than the tensor's own.
        data: whether it is an input, whose whole numbers may be a mask or places in a table.

    Returns:
        A tensor of the same dtype. Whole numbers of data stay, and so do zeros, infinities, NaNs, and
        numbers smaller than the unit.
    """
    if not isinstance(value, Tensor) or not is_rounded(value) or value.layout is not torch.strided:
        return value
    if value.is_complex():
        return torch.view_as_complex(neighbour(torch.view_as_real(value), generator, computes, data=data))
    if value.is_nested or value.element_size() not in INTEGERS:
        return value
    bits = value.detach().view(INTEGERS[value.element_size()])
    unit = 1 << max(0, _digits(value.dtype) - _digits(computes or value.dtype))
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=bits.dtype) * 2 - 1
    moved = (bits + signs.to(value.device) * unit).view(value.dtype)
    # of a number that is its own sign and magnitude, the bits count up away from zero
    far = (bits & torch.iinfo(bits.dtype).max) > unit
    stays = ~(far & value.isfinite() & moved.isfinite())
    if data:
        stays |= value == value.round()
    found = torch.where(stays, value.detach(), moved)
    if value.requires_grad and not value.is_leaf:  # computed from what is outside of DDP
        return value + (found - value.detach()).nan_to_num(0)
    return found.requires_grad_(value.requires_grad)


def _digits(dtype: torch.dtype) -> int:
    """Binary digits after the point of a number's significand."""
    return round(-math.log2(torch.finfo(dtype).eps))


def widened(state: Named) -> Named:
    """Parameters and buffers in float64."""
    return {name: cast(tensor, torch.float64) for name, tensor in state.items()}


@dataclass(frozen=True)
class Lesson:
    """Runs of eager, and what is known of them beforehand.

    Attributes:
        runs: eager's own, then those on neighbouring data.
        truth: the run in float64; None if it fails.
        sums: for each step what the ranks contribute to each gradient; empty if that is not known.
        sent_as: the dtype in which gradients are summed, if not their own.
        unstable: names of what eager does not reproduce: one run in float64 says nothing of it.
        written: names of parameters that something else than the optimizer writes to.
    """

    runs: Sequence[Record]
    truth: Record | None
    sums: Sequence[Mapping[str, Sum]] = ()
    sent_as: torch.dtype | None = None
    unstable: Collection[str] = field(default_factory=frozenset)
    written: Collection[str] = field(default_factory=frozenset)

    def learned(self) -> list[dict[str, Arithmetic]]:
        """For each step what eager's rounding does to each number."""
        return [self._step(step) for step in range(len(self.runs[0].moments))]

    def _step(self, step: int) -> dict[str, Arithmetic]:
        samples = [self._values(run, step) for run in self.runs]
        truth = {} if self.truth is None else self._values(self.truth, step)
        terms = self.sums[step] if step < len(self.sums) else {}
        return {
            name: arithmetic_of(
                [sample[name] for sample in samples if name in sample],
                None if plain(name) in self.unstable else truth.get(name),
                terms.get(name),
                self.sent_as,
            )
            for name in samples[0]
        }

    def _values(self, run: Record, step: int) -> dict[str, Tensor]:
        """What a step computes; a parameter that somebody writes to as if it had begun where eager's did."""
        values = {}
        for name, (kind, tensor) in left_behind(run.moments[step]).items():
            if kind is not Kind.PARAMETER:
                values[name] = tensor
            elif plain(name) in self.written:
                values[name] = tensor if run is self.runs[0] else self._moved(run, step, plain(name))
        return values

    def _moved(self, run: Record, step: int, name: str) -> Tensor:
        change = exact(run.steps[step].state[name]) - exact(run.starts[step][name])
        return exact(self.runs[0].starts[step][name]) + change
