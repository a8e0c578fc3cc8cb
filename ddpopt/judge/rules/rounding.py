"""Learn the effect of eager's rounding on each number of a step from eager runs on neighboring data.

Data are moved by one unit of the dtype in which operations compute. If a model enters autocast itself, that
is the dtype of autocast: operands are rounded to it before an operation, and a compiler may omit roundings
that cancel.

Invariant: no value is moved beyond the next number of the dtype that it is computed in, and zeros stay zeros.
`ddpopt.judge.rules.arithmetic.arithmetic_of` explains why such a run is as right as the original.
"""

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
from ddpopt.cases.option_cases import cast
from ddpopt.judge.compare import Sum, exact
from ddpopt.judge.engines.engine import Named
from ddpopt.judge.rules.arithmetic import Arithmetic, arithmetic_of, is_near_eager
from ddpopt.judge.rules.factors import FALSE_ALARM
from ddpopt.judge.training.record import (
    NumberKind,
    Record,
    RecordedStep,
    is_rounded,
    labeled,
    left_behind,
    plain,
)

SAMPLES = 8
"""Number of eager steps from which rounding is learned: one unchanged, the others perturbed."""
DEVICES = ("cpu", "cuda")
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def perturbed(case: Case, number: int, computes: torch.dtype | None) -> Case:
    """Give a case neighboring inputs. Whole numbers stay unchanged: they may be a mask or indices.

    Args:
        case: the case.
        number: selects the neighbors; each number gives different ones.
        computes: the dtype that operations round to, if not the dtype of their inputs.

    Returns: The changed case.
    """

    def inputs(rank: int, step: int) -> Any:
        generator = torch.Generator().manual_seed((number * 4096 + rank) * 4096 + step)
        return tree_map(lambda leaf: neighbor(leaf, generator, computes, data=True), case.inputs(rank, step))

    return replace(case, inputs=inputs)


def perturbed_state(state: Named, number: int, computes: torch.dtype | None) -> Named:
    """Neighboring parameters and buffers, the same on every rank; arguments as for `perturbed`."""
    generator = torch.Generator().manual_seed(number)
    return {name: neighbor(tensor, generator, computes) for name, tensor in state.items()}


def neighbor(
    value: Any, generator: torch.Generator, computes: torch.dtype | None = None, *, data: bool = False
) -> Any:
    """Move every floating-point number by one unit in the last place, up or down.

    Args:
        value: a tensor; anything else is returned unchanged.
        generator: draws the directions.
        computes: the dtype that defines the unit, if it is coarser than the tensor's own.
        data: whether the tensor is an input, whose whole numbers may be a mask or indices.

    Returns:
        A tensor of the same dtype. Whole numbers of data are unchanged, and so are zeros, infinities, NaNs
        and numbers smaller than the unit.
    """
    if not isinstance(value, Tensor) or not is_rounded(value) or value.layout is not torch.strided:
        return value
    if value.is_complex():
        return torch.view_as_complex(neighbor(torch.view_as_real(value), generator, computes, data=data))
    if value.is_nested or value.element_size() not in INTEGERS:
        return value
    bits = value.detach().view(INTEGERS[value.element_size()])
    unit = 1 << max(0, _digits(value.dtype) - _digits(computes or value.dtype))
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=bits.dtype) * 2 - 1
    moved = (bits + signs.to(value.device) * unit).view(value.dtype)
    # floats are stored as sign and magnitude, so their bits count up away from zero
    far = (bits & torch.iinfo(bits.dtype).max) > unit
    stays = ~(far & value.isfinite() & moved.isfinite())
    if data:
        stays |= value == value.round()
    found = torch.where(stays, value.detach(), moved)
    if value.requires_grad and not value.is_leaf:  # computed from tensors outside DDP
        return value + (found - value.detach()).nan_to_num(0)
    return found.requires_grad_(value.requires_grad)


def _digits(dtype: torch.dtype) -> int:
    """Binary digits of the significand after the point."""
    return round(-math.log2(torch.finfo(dtype).eps))


def widened(state: Named) -> Named:
    """Parameters and buffers in float64."""
    return {name: cast(tensor, torch.float64) for name, tensor in state.items()}


class _Watching(TorchFunctionMode):
    """Records the autocast dtype of each function call."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.dtypes.update(torch.get_autocast_dtype(d) for d in DEVICES if torch.is_autocast_enabled(d))
        return func(*args, **(kwargs or {}))


def autocast_dtypes(case: Case, rank: int, device: torch.device) -> set[torch.dtype]:
    """Return the autocast dtypes in one forward of a case.

    Args:
        case: the case.
        rank: the rank whose inputs are used.
        device: the device to run on.

    Returns:
        The dtypes that were seen; if the forward fails without DDP, those seen up to that point.
    """
    watching = _Watching()
    devices = [device] if device.type == "cuda" else []
    # a model that runs only under DDP may raise anything here; judging continues without these dtypes
    with torch.random.fork_rng(devices), contextlib.suppress(Exception):
        model = case.model().to(device)
        with watching:
            case.on(device).step(model, rank, 0)
    return watching.dtypes


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The dtype with the fewest digits; None if there are no dtypes.

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
    chance: float = FALSE_ALARM,
) -> list[dict[str, Arithmetic]]:
    """The effect of eager's rounding on each number of each step.

    Args:
        runs: eager's runs: the original, then those on neighboring data.
        truth: the run in float64; None if it fails.
        sums: for each step, the contributions of the ranks to each gradient; empty if unknown.
        sent_as: the dtype in which gradients are summed, if not their own.
        unstable: names of numbers that eager does not reproduce; a float64 run is no reference for them.
        written: names of parameters that something other than the optimizer writes to.
        chance: as for `ddpopt.judge.rules.arithmetic.arithmetic_of`.

    Returns:
        For each step, the rounding by the name of the number.
    """
    found: list[dict[str, Arithmetic]] = []
    for step, moment in enumerate(runs[0].moments):
        own, *others = (_values(run, step, moment, runs[0], written) for run in runs)
        wide = {} if truth is None else _values(truth, step, moment, runs[0], written)
        terms = sums[step] if step < len(sums) else {}
        is_extra = moment.moment in runs[0].extras
        samples = {
            name: [value, *(other[name] for other in others if name in other)] for name, value in own.items()
        }
        references = {
            name: None
            if labeled(plain(name), moment.moment, is_extra=is_extra) in unstable
            else wide.get(name)
            for name in own
        }
        forward = [name for name, (kind, _) in left_behind(moment).items() if kind is NumberKind.FORWARD]
        same_path = bool(forward) and all(is_near_eager(samples[name], references[name]) for name in forward)
        found.append(
            {
                name: arithmetic_of(
                    samples[name], references[name], terms.get(name), sent_as, chance, same_path=same_path
                )
                for name in own
            }
        )
    return found


def _values(
    run: Record, step: int, of_first: RecordedStep, first: Record, written: Collection[str]
) -> dict[str, Tensor]:
    """The numbers a step computes; parameters in `written` as if they had started as in the first run."""
    values: dict[str, Tensor] = {}
    own = next((one for one in run.moments if one.moment == of_first.moment), None)
    if own is None:
        return values
    for name, (kind, tensor) in left_behind(own).items():
        if kind is not NumberKind.PARAMETER:
            values[name] = tensor
        elif plain(name) in written:
            began = first.starts[step][plain(name)]
            begins = run.starts[step][plain(name)]
            values[name] = tensor if run is first else exact(began) + (exact(tensor) - exact(begins))
    return values
