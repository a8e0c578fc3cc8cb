"""Where a fault is injected: around a run, or in the trainer; and the proof that it was.

A fault that never ran proves nothing, whatever the run ended with. So each is given its site, and marks it
once the broken code has run there. Invariant: a site is marked only after something came out otherwise than
it would have without the fault.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ddpopt.judge.training.trainer import Trainer

Item = TypeVar("Item")


class NotInjected(Exception):
    """The program has no place where the fault can be injected."""


@dataclass
class Site:
    """One rank of the run into which a fault is injected.

    Attributes:
        rank: in the group that trains together.
        size: of that group.
        note: told once, when the broken code has run; for a rank that may not live to return.
        marked: whether the broken code has run.
    """

    rank: int
    size: int
    note: Callable[[], None] = lambda: None
    marked: bool = False

    def mark(self) -> None:
        """Report that the broken code ran."""
        if not self.marked:
            self.marked = True
            self.note()

    def mark_unless_equal(self, got: Tensor, right: Tensor) -> None:
        """Report that the broken code ran, if it produced anything but the right tensor."""
        if not torch.equal(got, right):
            self.mark()


Inject = Callable[[Site], AbstractContextManager[Any]]
"""A context that is active while the mode runs."""
Tamper = Callable[[Trainer, Site], None]
"""Changes the trainer once the model is data-parallel."""
Carriers = Callable[[int], range]
"""Maps the number of ranks to the ranks on which a fault runs."""


def every_rank(size: int) -> range:
    """All ranks."""
    return range(size)


def second_rank(size: int) -> range:
    """Only the second rank."""
    return range(1, min(size, 2))


def no_change(site: Site) -> AbstractContextManager[Any]:
    """Replace nothing."""
    return contextlib.nullcontext()


def untouched(trainer: Trainer, site: Site) -> None:
    """Leave a trainer unchanged."""


def first(items: Iterable[Item], what: str) -> Item:
    """Return the first thing of the kind that a fault needs.

    Args:
        items: what there is.
        what: what is looked for, in words.

    Raises:
        NotInjected: there is none.
    """
    for item in items:
        return item
    raise NotInjected(f"expected {what}, found none; put the fault into another case")


def weight(trainer: Trainer, index: int = 0) -> nn.Parameter:
    """A square weight of the model.

    Raises:
        NotInjected: the model has too few.
    """
    square = [p for p in trainer.parallel.model.parameters() if p.dim() == 2 and p.size(0) == p.size(1)]
    return first(square[index:], f"{index + 1} square weight(s)")


def after_backward(trainer: Trainer, action: Callable[[], None]) -> None:
    """Do something after each backward, after what the mode does there."""
    around = trainer.parallel.around_backward

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with around():
            yield
        action()

    trainer.parallel.around_backward = both  # type: ignore[method-assign]  # for this run alone
