"""Faults in the plan: the reducer's buckets differ from the plan's."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ddpopt.ddp import reducer as planned_reducer
from ddpopt.ddp.impose import impose
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.dynamo import backend
from ddpopt.dynamo.model_graphs import ModelGraphs
from ddpopt.judge.training.trainer import Trainer
from ddpopt.planning.plan import Plan
from tests.selftest.sites import Inject, NotInjected, Site, every_rank
from tests.support.models import plan_of

Indices = list[list[int]]


def bucketing(change: Callable[[Indices], Indices], carriers: Callable[[int], range] = every_rank) -> Inject:
    """Give the reducer buckets other than those of the plan."""

    def inject(site: Site) -> AbstractContextManager[Any]:
        original = planned_reducer._reducer_arguments

        def changed(ddp: Any, plan: Plan, names: Sequence[str]) -> dict[str, Any]:
            arguments = original(ddp, plan, names)
            planned = arguments["bucket_indices"]
            _require_two(planned)
            indices = change(planned)
            limits = arguments["per_bucket_size_limits"]
            if indices != planned:
                site.mark()
            sizes = (limits * len(indices))[: len(indices)]
            return arguments | {"bucket_indices": indices, "per_bucket_size_limits": sizes}

        if site.rank not in carriers(site.size):
            return contextlib.nullcontext()
        return patch.object(planned_reducer, "_reducer_arguments", changed)

    return inject


def _require_two(buckets: object) -> None:
    if not isinstance(buckets, (list, tuple)) or len(buckets) < 2:
        raise NotInjected(f"expected a plan of two buckets, got {buckets!r}; put the fault into another case")


def swapped(indices: Indices) -> Indices:
    """Swap the first two buckets."""
    return [indices[1], indices[0], *indices[2:]]


def late(indices: Indices) -> Indices:
    """Move the last parameter of the first bucket to the second one."""
    return [indices[0][:-1], [indices[0][-1], *indices[1]], *indices[2:]]


def dropped(indices: Indices) -> Indices:
    """Leave out the last bucket."""
    return indices[:-1]


def doubled(indices: Indices) -> Indices:
    """Duplicate the first bucket."""
    return [indices[0], *indices]


def merged(indices: Indices) -> Indices:
    """Put everything into one bucket."""
    return [[index for bucket in indices for index in bucket]]


def other_plan_on_one_rank(trainer: Trainer, site: Site) -> None:
    """Impose a plan that fits the module, but on the second rank in another order."""
    specs = specs_from_ddp(trainer.ddp)
    _require_two(specs)
    if site.rank == 1:
        specs = specs[::-1]
        site.mark()
    impose(trainer.ddp, plan_of([[spec] for spec in specs]))


@contextlib.contextmanager
def unfit_plan_on_one_rank(site: Site) -> Iterator[None]:
    """Make the second rank plan a parameter one bucket later, without changing the sizes of the buckets."""
    if site.rank != 1:
        yield
        return
    original = ModelGraphs.joined

    def joined(self: ModelGraphs) -> Plan | None:
        plan = original(self)
        if plan is None:
            return None
        _require_two(plan.buckets)
        former, latter, *others = plan.buckets
        *kept, moved = former.params
        changed = (replace(former, params=tuple(kept)), replace(latter, params=(moved, *latter.params)))
        site.mark()
        return replace(plan, buckets=(*changed, *others))

    with patch.object(ModelGraphs, "joined", joined):
        yield


def no_plan(site: Site) -> AbstractContextManager[Any]:
    """Never give the plan to the reducer."""

    def ignored(*_: Any) -> None:
        """Keep DDP's own buckets."""
        site.mark()

    return patch.object(backend, "defer", ignored)
