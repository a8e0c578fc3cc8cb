"""The buffers that each forward of a run saw, for a run of the model alone to see the same.

DDP broadcasts the first rank's buffers before a forward, when it thinks fit. What the model alone computes on
another rank is what DDP reduces only if it reads those.

Invariant: nothing is sent; a run that has more forwards than the one it follows keeps its own buffers there.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ddpopt.judge.parallel import Named
from ddpopt.judge.trainer import Trainer

__all__ = ["SeenBuffers"]


class SeenBuffers:
    """The buffers of one run, forward by forward, of each of its models."""

    def __init__(self) -> None:
        self._seen: dict[int, list[Named]] = {}

    def remember(self, trainer: Trainer) -> None:
        """Note what the forwards of a run see from now on; for `ddpopt.judge.training.Course.tamper`."""
        self._seen.clear()
        for index, parallel in enumerate(trainer.models):
            self._seen[index] = []
            parallel.model.register_forward_pre_hook(_noting(self._seen[index]))

    def show(self, trainer: Trainer) -> None:
        """Have the forwards of a run see what those of the remembered one saw."""
        for index, parallel in enumerate(trainer.models):
            parallel.model.register_forward_pre_hook(_showing(self._seen.get(index, [])))


def _noting(seen: list[Named]) -> Any:
    def note(model: nn.Module, _: Any) -> None:
        seen.append({name: buffer.detach().clone() for name, buffer in model.named_buffers()})

    return note


def _showing(seen: list[Named]) -> Any:
    left = iter(seen)

    def show(model: nn.Module, _: Any) -> None:
        known = next(left, {})
        for name, buffer in model.named_buffers():
            if name in known:
                buffer.detach().copy_(known[name])

    return show
