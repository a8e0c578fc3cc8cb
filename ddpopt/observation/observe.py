"""Observing a block of training: buckets, collectives in order, compiled graphs.

Nothing is registered with the DDP module (a communication hook could never be removed). A dispatch mode
records the collectives, and the running reducer itself reports which parameters a bucket holds. Each
bucket is then matched with a collective of its size, so that neither source is trusted alone.

Invariant: the block runs as it would without observation, and afterwards everything is as before.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ddpopt.ddp.engine import NO_TASK, task_id
from ddpopt.ddp.fit import ddp_module
from ddpopt.ddp.held import planned_reducer, running_reducer
from ddpopt.ddp.specs import specs_from_ddp
from ddpopt.ddp.state import state_of
from ddpopt.errors import UsageError
from ddpopt.observation.compilations import Compilations
from ddpopt.observation.events import Collective, Iteration
from ddpopt.observation.launches import Launch, LaunchMode
from ddpopt.observation.reducer_buckets import ObservedBucket, buckets_of, running_buckets
from ddpopt.observation.text import text_of
from ddpopt.planning.plan import Plan

STEP_OPS = ("all_reduce", "all_reduce_coalesced")
"""The functional collectives with which a step in one graph sends its buckets; the reducer's is another."""


def observe(ddp: nn.Module) -> "Observation":
    """Observe a DDP module in a ``with`` block.

    Args:
        ddp: the DDP module, or a module that contains it: compiled, or in a framework's wrapper.

    Returns:
        A context manager that yields itself; read its properties after the block, or inside it between
        backwards. It can be entered only once.

    Raises:
        UsageError: ``ddp`` is not a DDP module, or has an option that leaves no buckets.
    """
    return Observation(ddp_module(ddp))


@dataclass
class _Backward:
    """One backward so far: its launches, and the reducer that it used, or the plan of a step in one graph."""

    reducer: "weakref.ReferenceType[Any]"
    rebuilds: int
    plan: Plan | None
    launches: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)


class Observation:
    """The recorded events; made by :func:`observe`."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._mode: LaunchMode | None = None
        self._compilations = Compilations()
        self._launches: list[Launch] = []
        self._elsewhere: list[Launch] = []
        self._backwards: list[_Backward] = []
        self._open: _Backward | None = None
        self._rebuilds = 0
        self._seen: list[tuple[weakref.ReferenceType[Any], int, tuple[ObservedBucket, ...]]] = []
        self._hooked = False
        self._active = False
        self._parameter_count = len(specs_from_ddp(ddp))

    def __str__(self) -> str:
        """What was seen, as tables: the buckets of the last backward, and what else was sent."""
        return text_of(self.iterations, self.collectives, self.elsewhere, self.graphs)

    def __enter__(self) -> "Observation":
        if self._mode is not None:
            raise UsageError("this observation was already used; call ddpopt.observe(ddp) for each block")
        self._active = True
        self._refresh()
        self._mode = LaunchMode(self._launched, self._close)
        self._compilations.start()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # of torch
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*raised)  # type: ignore[no-untyped-call]  # of torch
        self._compilations.stop()
        self._refresh()
        self._active = False

    @property
    def buckets(self) -> tuple[ObservedBucket, ...]:
        """The buckets of the last backward that was synchronized; empty if there was none."""
        iterations = self.iterations
        return iterations[-1].buckets if iterations else ()

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """One entry for each backward that was synchronized, in order; a step in one graph is one, too."""
        self._refresh()
        collectives = self.collectives
        return tuple(
            Iteration(self._buckets_of(each) or (), tuple(collectives[index] for index in each.launches))
            for each in self._backwards
        )

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives on the module's process group, in launch order."""
        self._refresh()
        carried: dict[int, int] = {}
        for backward in self._backwards:
            carried.update(self._carried(backward))
        return tuple(
            Collective(launch.op, launch.nbytes, launch.dtype, carried.get(index), launch.how)
            for index, launch in enumerate(self._launches)
        )

    @property
    def elsewhere(self) -> tuple[Collective, ...]:
        """All collectives on other process groups, in launch order."""
        return tuple(
            Collective(launch.op, launch.nbytes, launch.dtype, None, launch.how) for launch in self._elsewhere
        )

    @property
    def graphs(self) -> tuple[str, ...]:
        """The compile ids (for instance ``"0/0"``) of the graphs that Dynamo compiled, in order.

        ``torch._dynamo.reset()`` inside the block ends the observation of graphs.
        """
        return tuple(self._compilations.graphs)

    # --------------------------------------------------------------------------------------------- recording

    def _launched(self, launch: Launch) -> None:
        if launch.group != str(self._ddp.process_group.group_name):
            self._elsewhere.append(launch)
            return
        plan = state_of(self._ddp).step_plan if launch.op in STEP_OPS and not launch.in_backward else None
        if plan or launch.in_backward:
            self._current_backward(plan).launches.append(len(self._launches))
        elif (launch.op, launch.dtype, launch.numel) == ("broadcast", "int32", self._parameter_count + 1):
            # Rank 0's ready order, which the reducer sends before it rebuilds its buckets: parameter indices
            # and a count. A similar broadcast by the user is harmless: the buckets are then the same before
            # and after it.
            self._rebuilds += 1
        self._launches.append(launch)

    def _current_backward(self, plan: Plan | None) -> _Backward:
        # A reentrant backward (checkpointing) runs inside another one with its own task number. No operator
        # outside of backward runs between the two, but at least one does between two iterations.
        task = task_id()
        current = self._open
        if current is None or (task not in current.tasks and self._is_complete(current)):
            current = self._open = _Backward(_identity(self._ddp), self._rebuilds, plan)
            self._backwards.append(current)
        if plan is None:
            current.tasks.append(task)
        return current

    def _close(self) -> None:
        # a step in one graph computes between its collectives
        self._open = self._open if self._open and self._open.plan else None

    def _is_complete(self, backward: _Backward) -> bool:
        buckets = self._buckets_of(backward)
        return buckets is not None and len(self._carried(backward)) == len(buckets)

    # ---------------------------------------------------------------------------------------------- analysis

    def _refresh(self) -> None:
        # After the block the reducer may change its buckets. And in a backward this thread may hold the
        # reducer's lock, which is needed to read both the buckets and the log.
        if not self._active or task_id() != NO_TASK:
            return
        self._hooked = bool(self._ddp._get_ddp_logging_data().get("comm_hook"))
        reducer = _identity(self._ddp)
        if not any(of is reducer and rebuilds == self._rebuilds for of, rebuilds, _ in self._seen):
            self._seen.append((reducer, self._rebuilds, running_buckets(self._ddp)))

    def _buckets_of(self, backward: _Backward) -> tuple[ObservedBucket, ...] | None:
        """The buckets at the time of a backward; None if no longer known."""
        if backward.plan is not None:
            return buckets_of(backward.plan)
        # An object has a single plain weakref: comparing these tells apart even reducers that are gone.
        own = {rebuilds: seen for of, rebuilds, seen in self._seen if of is backward.reducer}
        before = [seen for rebuilds, seen in own.items() if rebuilds <= backward.rebuilds][-1:]
        after = [seen for rebuilds, seen in own.items() if rebuilds >= backward.rebuilds][:1]
        return before[0] if before and before == after else None

    def _carried(self, backward: _Backward) -> dict[int, int]:
        """Match launches with buckets, which are sent in order, each in one all-reduce of its size."""
        buckets = self._buckets_of(backward) or ()
        place = 0
        carried = dict[int, int]()
        for index in backward.launches:
            for bucket in buckets[place:]:
                if _fits(self._launches[index], bucket, self._hooked):
                    carried[index] = bucket.index
                    place = bucket.index + 1
                    break
        return carried


def _identity(ddp: Any) -> "weakref.ReferenceType[Any]":
    """The identity of a module's reducer, shared by all that follow one plan: a rebuilding replaces them."""
    planned = planned_reducer(ddp)
    return weakref.ref(running_reducer(ddp) if planned is None else planned.plan)


REAL_OF = {"complex64": "float32", "complex128": "float64"}
"""Complex gradients are sent as pairs of real numbers."""


def _fits(launch: Launch, bucket: ObservedBucket, hooked: bool) -> bool:
    if bucket.dtype in REAL_OF and (launch.numel, launch.dtype) == (2 * bucket.numel, REAL_OF[bucket.dtype]):
        return launch.op == "allreduce" or hooked
    # A hook may send the bucket's elements in another dtype.
    return launch.numel == bucket.numel and (
        hooked or (launch.op in ("allreduce", *STEP_OPS) and launch.dtype == bucket.dtype)
    )
