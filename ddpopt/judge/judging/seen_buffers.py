"""The buffers that each forward of a run saw, for a run of the model alone to see the same.

DDP broadcasts the first rank's buffers before a forward, when it thinks fit. What the model alone computes on
another rank is what DDP reduces only if it reads those.

Invariant: nothing is sent; a run that has more forwards than the one it follows keeps its own buffers there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from ddpopt.judge.parallel import Named
from ddpopt.judge.trainer import Trainer


class SeenBuffers:
    """The buffers of one run, forward by forward, of each of its models."""

    def __init__(self) -> None:
        self._seen: list[list[Named]] = []

    def remember(self, trainer: Trainer) -> None:
        """Note what the forwards of a run see from now on; for `ddpopt.judge.training.Course.tamper`."""
        self._seen = [[] for _ in trainer.models]
        for parallel, seen in zip(trainer.models, self._seen, strict=True):
            parallel.model.register_forward_pre_hook(partial(_note, seen))

    def show(self, trainer: Trainer) -> None:
        """Have the forwards of a run see what those of the remembered one saw."""
        for parallel, seen in zip(trainer.models, self._seen, strict=True):
            parallel.model.register_forward_pre_hook(partial(_set, iter(seen)))


def _note(seen: list[Named], model: nn.Module, _: object) -> None:
    seen.append({name: buffer.detach().clone() for name, buffer in model.named_buffers()})


def _set(left: Iterator[Named], model: nn.Module, _: object) -> None:
    known: Named = next(left, {})
    for name, buffer in model.named_buffers():
        if name in known:
            buffer.detach().copy_(known[name])
