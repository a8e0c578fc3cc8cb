"""Where a fault is put in: around a run, or into the trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ddpopt.verify.training import Trainer

Inject = Callable[[int], AbstractContextManager[Any]]
"""From the rank to what holds while the mode runs."""
Tamper = Callable[[Trainer], None]


def no_change(rank: int) -> AbstractContextManager[Any]:
    """Replace nothing."""
    del rank
    return contextlib.nullcontext()


def weight(trainer: Trainer, index: int = 0) -> nn.Parameter:
    """A square weight of the model."""
    square = [p for p in trainer.parallel.model.parameters() if p.dim() == 2 and p.size(0) == p.size(1)]
    return square[index]


def after_backward(trainer: Trainer, action: Callable[[], None]) -> None:
    """Do something after each backward, behind what the mode does there."""
    before = trainer.parallel.after_backward

    def both() -> None:
        before()
        action()

    trainer.parallel.after_backward = both
