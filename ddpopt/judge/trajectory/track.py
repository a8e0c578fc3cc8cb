"""The numbers of a run, step by step: eager's are kept in files, those of other runs are compared with them.

Invariant: whatever the number of steps, of eager's run one step is in memory, and of any other run nothing
but a few figures for each number and step.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ddpopt.judge.compare import dense
from ddpopt.judge.training.record import (
    BUFFER,
    PARAMETER,
    STATE,
    NumberKind,
    RecordedStep,
    is_rounded,
    left_behind,
)
from ddpopt.judge.trajectory.envelope import NOWHERE, Array, Distance, Scale, distance, scale_of, ulps


def numbers_of(step: RecordedStep) -> dict[str, tuple[NumberKind, Tensor]]:
    """All numbers that a step leaves, by name: those of the ladder, optimizer state, and whole numbers."""
    found = left_behind(step)
    found |= {STATE + name: (NumberKind.PARAMETER, tensor) for name, tensor in step.optimizer.items()}
    counts = (name for name in step.state if name not in step.gradients and not is_rounded(step.state[name]))
    return found | {BUFFER + name: (NumberKind.FORWARD, step.state[name]) for name in counts}


@dataclass(frozen=True)
class KnownNumber:
    """What is known of one of eager's numbers at one step without its file.

    Attributes:
        kind: what it depends on.
        dtype: its dtype.
        scale: its size.
    """

    kind: NumberKind
    dtype: torch.dtype
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
        self.steps: list[dict[str, KnownNumber]] = []

    def keep(self, step: RecordedStep) -> None:
        """Keep the next step."""
        numbers = numbers_of(step)
        arrays = {name: array_of(tensor) for name, (_, tensor) in numbers.items()}
        (self._folder / f"{len(self.steps)}").write_bytes(pickle.dumps(arrays, pickle.HIGHEST_PROTOCOL))
        self.steps.append(
            {
                name: KnownNumber(kind, tensor.dtype, scale_of(arrays[name], dense(tensor).dtype))
                for name, (kind, tensor) in numbers.items()
            }
        )

    def arrays(self, step: int) -> dict[str, Array]:
        """The numbers of a step; complex ones as pairs."""
        found: dict[str, Array] = pickle.loads((self._folder / f"{step}").read_bytes())
        return found

    def restore(self, model: nn.Module, step: int) -> None:
        """Set a model's parameters and buffers to those that a step left."""
        arrays = self.arrays(step)
        prefixed = ((PARAMETER, model.named_parameters()), (BUFFER, model.named_buffers()))
        with torch.no_grad():
            for prefix, named in prefixed:
                for name, tensor in named:
                    if prefix + name in arrays:
                        target = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                        target.copy_(torch.from_numpy(arrays[prefix + name]))


def array_of(tensor: Tensor) -> Array:
    """A copy of a tensor's values; what NumPy has no dtype for is widened."""
    own = dense(tensor)
    if own.is_floating_point() and own.element_size() < 4:
        own = own.float()
    return own.cpu().numpy().copy()


@dataclass(frozen=True)
class ComparedNumber:
    """One number of a run next to eager's.

    Attributes:
        distance: how far it is.
        ulps: the same in units in the last place; 0 if it is equal bit for bit.
        is_equal: whether it is; the two zeros are equal, and so are NaNs.
        is_missing: whether this run has no such number of eager's shape and dtype.
    """

    distance: Distance
    ulps: float = 0.0
    is_equal: bool = True
    is_missing: bool = False


EQUAL = ComparedNumber(Distance(0.0, 0.0, 0.0))
MISSING = ComparedNumber(NOWHERE, float("inf"), is_equal=False, is_missing=True)


class ComparedRun:
    """Another run, each step of which is compared with eager's as it ends.

    Args:
        track: eager's run.
        is_wide: whether it computes in float64, whatever eager computes in.
        is_judged: whether differences are also counted in units in the last place.

    Attributes:
        steps: for each step, the numbers that eager has.
        graphs: the number of compiled graphs.
    """

    def __init__(self, track: Track, *, is_wide: bool = False, is_judged: bool = False) -> None:
        self._track = track
        self._is_wide = is_wide
        self._is_judged = is_judged
        self.steps: list[dict[str, ComparedNumber]] = []
        self.graphs = 0

    def take(self, step: RecordedStep) -> None:
        """Compare the next step."""
        place = len(self.steps)
        if place == len(self._track.steps):  # it takes more steps than eager, which L3 reports
            return
        known = self._track.steps[place]
        got = {name: tensor for name, (_, tensor) in numbers_of(step).items()}
        eager = self._track.arrays(place)
        self.steps.append(
            {name: self._found(got.get(name), eager[name], known[name].dtype) for name in eager}
        )

    def _found(self, got: Tensor | None, eager: Array, dtype: torch.dtype) -> ComparedNumber:
        if got is None or (got.dtype != dtype and not self._is_wide):
            return MISSING
        value = array_of(got)
        if value.shape != eager.shape:
            return MISSING
        far = distance(value, eager)
        if far.largest == 0:
            return EQUAL
        off = ulps(value, eager, dense(got).dtype) if self._is_judged else float("nan")
        return ComparedNumber(far, off, is_equal=False)
