"""Faults in the plan: the reducer has other buckets than the plan says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ddpopt import backend, planned_reducer
from ddpopt.plan import Plan
from ddpopt.regions import Regions
from ddpopt.verify.fault_sites import Inject

Indices = list[list[int]]


def bucketing(change: Callable[[Indices], Indices], only_rank: int | None = None) -> Inject:
    """Give the reducer other buckets than those of the plan."""

    @contextlib.contextmanager
    def inject(rank: int) -> Iterator[None]:
        original = planned_reducer._reducer_arguments

        def changed(ddp: Any, plan: Plan) -> dict[str, Any]:
            arguments = original(ddp, plan)
            indices = change(arguments["bucket_indices"])
            limits = arguments["per_bucket_size_limits"]
            return arguments | {
                "bucket_indices": indices,
                "per_bucket_size_limits": (limits * len(indices))[: len(indices)],
            }

        if only_rank is not None and rank != only_rank:
            yield
            return
        with patch.object(planned_reducer, "_reducer_arguments", changed):
            yield

    return inject


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
    """Have the first bucket twice."""
    return [indices[0], *indices]


def merged(indices: Indices) -> Indices:
    """Have one bucket of everything."""
    return [[index for bucket in indices for index in bucket]]


@contextlib.contextmanager
def other_plan_on_one_rank(rank: int) -> Iterator[None]:
    """Have the second rank plan a parameter one bucket later."""
    if rank != 1:
        yield
        return
    original = Regions.joined

    def joined(self: Regions) -> Plan | None:
        plan = original(self)
        return None if plan is None else _with_late_parameter(plan)

    with patch.object(Regions, "joined", joined):
        yield


def _with_late_parameter(plan: Plan) -> Plan:
    first, second, *others = plan.buckets
    *kept, moved = first.params
    changed = (
        replace(first, params=tuple(kept)),
        replace(second, params=(moved, *second.params)),
    )
    return replace(plan, buckets=(*changed, *others))


def no_plan(rank: int) -> AbstractContextManager[Any]:
    """Never tell the reducer of the plan."""
    del rank

    def ignored(*_: Any) -> None:
        """Leave DDP's own buckets in force."""

    return patch.object(backend, "defer", ignored)
