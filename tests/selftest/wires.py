"""Faults in communication: what the ranks receive is not the mean of what they sent.

DDP reads the annotations of a communication hook, so they are no strings here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ddpopt.judge.training.trainer import Trainer
from tests.selftest import codes as code
from tests.selftest.sites import Site, Tamper, after_backward, weight
from tests.support.models import completed

Change = Callable[[Tensor, Tensor, dist.ProcessGroup], Tensor]
"""Maps the mean over ranks, this rank's own gradients and the group to what is received."""


def through(received: Change) -> Tamper:
    """Change what is received for the first bucket, with a communication hook."""

    def tamper(trainer: Trainer, site: Site) -> None:
        group = trainer.place.group

        def hook(_: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
            own = bucket.buffer().clone()
            mean = bucket.buffer().div_(trainer.place.size)
            dist.all_reduce(mean, group=group)
            return completed(changed(mean, own) if bucket.index() == 0 else mean)

        def changed(mean: Tensor, own: Tensor) -> Tensor:
            right = mean.clone()
            got = received(mean, own, group)
            site.mark_unless_equal(got, right)
            return got

        trainer.ddp.register_comm_hook(None, hook)

    return tamper


def on_mean(change: "code.Change | type[code.Stale]") -> Tamper:
    """Change the first bucket in the way in which compiled code gets a gradient wrong."""

    def tamper(trainer: Trainer, site: Site) -> None:
        received = change() if isinstance(change, type) else change
        through(lambda mean, *_: received(mean))(trainer, site)

    return tamper


def reduced_twice(mean: Tensor, own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the means."""
    dist.all_reduce(mean, group=group)
    return mean


def from_first_rank(mean: Tensor, own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The first rank's own gradients, on all ranks."""
    dist.broadcast(own, dist.get_global_rank(group, 0), group)
    return own


def partly_reduced(mean: Tensor, own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's own gradients at the end of the bucket."""
    place = mean.numel() - 8
    return torch.cat([mean[:place], own[place:]])


def contribution_lost(mean: Tensor, own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The last rank's gradients counted as zero."""
    size = dist.get_world_size(group)
    lost = own.clone() if dist.get_rank(group) == size - 1 else torch.zeros_like(own)
    dist.all_reduce(lost, group=group)
    return mean - lost / size


def sending(group_of: Callable[[Trainer], dist.ProcessGroup | None]) -> Tamper:
    """Add an unrequested all-reduce before each forward."""

    def tamper(trainer: Trainer, site: Site) -> None:
        call = trainer.parallel.call

        def sends(*args: Any, **kwargs: Any) -> Any:
            dist.all_reduce(torch.zeros(1, device=trainer.place.device), group=group_of(trainer))
            site.mark()
            return call(*args, **kwargs)

        trainer.parallel.call = sends

    return tamper


def hooks_removed(trainer: Trainer, site: Site) -> None:
    """Remove the reducer from the backward, once it no longer changes."""
    original = trainer.parallel.around_backward

    def around() -> Any:
        trainer.ddp._remove_autograd_hooks()
        site.mark()
        return original()

    trainer.parallel.around_backward = around  # type: ignore[method-assign]  # for this run alone


def no_sync_ignored(trainer: Trainer, site: Site) -> None:
    """Make no_sync do nothing."""

    def nothing_skipped() -> AbstractContextManager[None]:
        site.mark()
        return nullcontext()

    trainer.parallel.no_sync = nothing_skipped  # type: ignore[method-assign]  # for this run alone


def buffers_not_broadcast(trainer: Trainer, site: Site) -> None:
    """Leave each rank's buffers unchanged."""
    would_sync = trainer.ddp.will_sync_module_buffers

    def never() -> bool:
        if would_sync():
            site.mark()
        return False

    trainer.ddp.will_sync_module_buffers = never


def drifting_rank(trainer: Trainer, site: Site) -> None:
    """Move a weight on the last rank, after each backward."""
    if trainer.place.rank != trainer.place.size - 1:
        return
    parameter = weight(trainer)

    def drift() -> None:
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(1.001)
        site.mark_unless_equal(parameter, before)

    after_backward(trainer, drift)
