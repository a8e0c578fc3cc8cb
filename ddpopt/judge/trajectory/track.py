"""The numbers of a run, step by step: eager's are kept in files, those of other runs are compared with them.

Invariant: whatever the number of steps, of eager's run one step is in memory, and of any other run nothing
but a few figures for each number and step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddpopt.judge.compare import bitwise, dense, ulps
from ddpopt.judge.engines.engine import Named
from ddpopt.judge.training.record import (
    BUFFER,
    PARAMETER,
    STATE,
    NumberKind,
    RecordedStep,
    alike,
    is_rounded,
    left_behind,
)
from ddpopt.judge.trajectory.envelope import NOWHERE, Distance, Scale, distance, scale_of


def numbers_of(step: RecordedStep) -> dict[str, tuple[NumberKind, Tensor]]:
    """All numbers that a step leaves, by name: those of the ladder, optimizer state, and whole numbers."""
    found = left_behind(step)
    found |= {STATE + name: (NumberKind.PARAMETER, tensor) for name, tensor in step.optimizer.items()}
    counts = (name for name in step.state if name not in step.gradients and not is_rounded(step.state[name]))
    return found | {BUFFER + name: (NumberKind.FORWARD, step.state[name]) for name in counts}


@dataclass(frozen=True)
class Known:
    """What is known of one of eager's numbers at one step without its file.

    Attributes:
        kind: what it depends on.
        scale: its size.
    """

    kind: NumberKind
    scale: Scale


class Track:
    """Eager's run, which is kept in files.

    Args:
        folder: an empty folder, which the caller removes.

    Attributes:
        steps: for each step, what is known of its numbers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.steps: list[dict[str, Known]] = []

    def keep(self, step: RecordedStep) -> None:
        """Keep the next step."""
        numbers = numbers_of(step)
        tensors = {name: _own(tensor) for name, (_, tensor) in numbers.items()}
        torch.save(tensors, self._folder / f"{len(self.steps)}.pt")
        self.steps.append({name: Known(kind, scale_of(tensor)) for name, (kind, tensor) in numbers.items()})

    def forget(self) -> None:
        """Begin again, after a run that failed."""
        self.steps.clear()

    def tensors(self, step: int) -> Named:
        """The numbers of a step."""
        found: Named = torch.load(self._folder / f"{step}.pt", weights_only=True)
        return found

    def state(self, step: int) -> Named:
        """The parameters and buffers that a step left."""
        tensors = self.tensors(step)
        return {
            name.removeprefix(prefix): tensor
            for prefix in (PARAMETER, BUFFER)
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }


def _own(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that keeps nothing else alive."""
    return dense(tensor).cpu().clone()


@dataclass(frozen=True)
class Found:
    """One number of a run next to eager's.

    Attributes:
        distance: how far it is.
        ulps: the same in units in the last place; 0 if it is equal bit for bit.
        is_equal: whether it is.
    """

    distance: Distance
    ulps: float = 0.0
    is_equal: bool = True


EQUAL = Found(Distance(0.0, 0.0, 0.0))
MISSING = Found(NOWHERE, float("inf"), is_equal=False)


class Next:
    """Another run, each step of which is compared with eager's as it ends.

    Args:
        track: eager's run.

    Attributes:
        steps: for each step, the numbers that eager has.
        graphs: the number of compiled graphs.
    """

    def __init__(self, track: Track) -> None:
        self._track = track
        self.steps: list[dict[str, Found]] = []
        self.graphs = 0

    def take(self, step: RecordedStep) -> None:
        """Compare the next step."""
        place = len(self.steps)
        if place == len(self._track.steps):  # it takes more steps than eager, which L3 reports
            return
        got = {name: tensor for name, (_, tensor) in numbers_of(step).items()}
        self.steps.append(
            {name: _found(got, name, value) for name, value in self._track.tensors(place).items()}
        )


def _found(numbers: Mapping[str, Tensor], name: str, eager: Tensor) -> Found:
    if name not in numbers:
        return MISSING
    got = _own(numbers[name])
    if not alike(got, eager):
        return MISSING
    if bitwise(got, eager).right:
        return EQUAL
    off = ulps(got, eager) if got.is_floating_point() else float("inf")
    return Found(distance(got, eager), off, is_equal=False)
