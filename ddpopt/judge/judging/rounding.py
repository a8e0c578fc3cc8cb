"""What eager's rounding does to each number of a step, learned from eager runs on neighbouring data.

Data are moved by a unit of the dtype that is computed in. Where a model opens autocast itself, that is the
dtype of autocast: operands are rounded to it before an operation, and a compiler may leave out roundings that
cancel.

Invariant: no datum is moved further than to the next number of the dtype that it is computed in, and zeros
stay zeros: `ddpopt.judge.judging.arithmetic.arithmetic_of` says why such a run is as right as the first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ddpopt.cases.case import Case
from ddpopt.judge.compare import Sum, exact
from ddpopt.judge.judging.arithmetic import Arithmetic, arithmetic_of
from ddpopt.judge.judging.record import NumberKind, Record, is_rounded, left_behind, plain
from ddpopt.judge.option_cases import cast
from ddpopt.judge.parallel import Named
from ddpopt.judge.trainer import on_device

SAMPLES = 8
"""Eager steps from which eager's rounding is learned: one as it is, the others perturbed."""
DEVICES = ("cpu", "cuda")
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


class _Watching(TorchFunctionMode):
    """Notes the dtype of the autocast that each function is called under."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.dtypes.update(torch.get_autocast_dtype(d) for d in DEVICES if torch.is_autocast_enabled(d))
        return func(*args, **(kwargs or {}))


def autocast_dtypes(case: Case, rank: int, device: torch.device) -> set[torch.dtype]:
    """The dtypes of autocast in one forward of a case.

    Args:
        case: the case.
        rank: whose inputs to use.
        device: where to run it.

    Returns:
        Those that were seen; of a forward that fails alone, those up to there.
    """
    watching = _Watching()
    devices = [device] if device.type == "cuda" else []
    # whatever a model raises that runs under DDP only: judging goes on without this
    with torch.random.fork_rng(devices), contextlib.suppress(Exception):
        model = case.model().to(device)
        moved = replace(case, inputs=lambda r, s: on_device(case.inputs(r, s), device))
        with watching:
            moved.step(model, rank, 0)
    return watching.dtypes


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype with the fewest digits; None of none.

    >>> coarsest([torch.float16, torch.bfloat16])
    torch.bfloat16
    """
    return max(dtypes, key=lambda dtype: (torch.finfo(dtype).eps, str(dtype)), default=None)


def learned(
    runs: Sequence[Record],
    truth: Record | None,
    sums: Sequence[Mapping[str, Sum]] = (),
    sent_as: torch.dtype | None = None,
    *,
    unstable: Collection[str] = (),
    written: Collection[str] = (),
) -> list[dict[str, Arithmetic]]:
    """What eager's rounding does to each number of each step.

    Args:
        runs: of eager: its own, then those on neighbouring data.
        truth: the run in float64; None if it fails.
        sums: for each step what the ranks contribute to each gradient; empty if that is not known.
        sent_as: the dtype in which gradients are summed, if not their own.
        unstable: names of what eager does not reproduce: one run in float64 says nothing of it.
        written: names of parameters that something else than the optimizer writes to.

    Returns:
        For each step, by the name of the number.
    """
    found = []
    for step in range(len(runs[0].moments)):
        own, *others = (_values(run, step, runs[0], written) for run in runs)
        wide = {} if truth is None else _values(truth, step, runs[0], written)
        terms = sums[step] if step < len(sums) else {}
        found.append(
            {
                name: arithmetic_of(
                    [value, *(other[name] for other in others if name in other)],
                    None if plain(name) in unstable else wide.get(name),
                    terms.get(name),
                    sent_as,
                )
                for name, value in own.items()
            }
        )
    return found


def _values(run: Record, step: int, first: Record, written: Collection[str]) -> dict[str, Tensor]:
    """What a step computes; a parameter that somebody writes to as if it had begun as in the first run."""
    values = {}
    for name, (kind, tensor) in left_behind(run.moments[step]).items():
        if kind is not NumberKind.PARAMETER:
            values[name] = tensor
        elif plain(name) in written:
            began, begins = first.starts[step][plain(name)], run.starts[step][plain(name)]
            values[name] = tensor if run is first else exact(began) + (exact(tensor) - exact(begins))
    return values
