"""One process's view of its ranks, and the process group in which they meet.

`joined` uses ranks that exist, on one node or several; `ddpopt.ranks.pool` starts ranks on this machine. A
task sees no difference.

Touches one private name of torch, ``_get_default_store``. Invariant: no task waits forever. A
task that exceeds its limit is ended after its stacks are written.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ddpopt.errors import InfrastructureError, UsageError
from ddpopt.ranks.arrival import meeting
from ddpopt.ranks.black_box import keeping_record_of_launched
from ddpopt.ranks.environment import has_launched_peers
from ddpopt.ranks.exchange import Exchange
from ddpopt.ranks.limits import Limits

COLLECTIVE_LIMIT_S = 300.0
LEAVING_LIMIT_S = 30.0


@dataclass(frozen=True)
class Ranks:
    """One process's view of the ranks that it works with.

    Attributes:
        rank: this process's rank.
        size: the number of ranks.
        device: the device of this rank's model.
        backend: backend of the default process group: ``"gloo"``, or ``"nccl"`` where each rank has a GPU.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    _exchange: Exchange = field(repr=False, compare=False)
    _limits: Limits = field(default_factory=Limits, repr=False, compare=False)
    _send: Callable[[object], None] = field(default=lambda _: None, repr=False, compare=False)

    def gather(self, value: Any, limit_s: float | None = None) -> list[Any]:
        """Send every rank's value to every rank; each rank must call it.

        It uses no process group, so it works even if one is broken.

        Args:
            value: anything that cloudpickle can pickle.
            limit_s: how long this rank waits, in seconds; by default that of the whole group.

        Returns:
            The values, by rank.

        Raises:
            InfrastructureError: a rank left, or did not arrive in time.
        """
        # Pickled here because only cloudpickle can handle the classes of a user's script.
        values = self._exchange.gather(cloudpickle.dumps(value), limit_s)
        return [cloudpickle.loads(data) for data in values]

    def leave(self) -> None:
        """Announce to the other ranks that this one failed, so that none waits for its value."""
        self._exchange.leave()

    def emit(self, event: object) -> None:
        """Send an event to the observer of the run, immediately and in order; does nothing except on rank 0.

        Args:
            event: anything that cloudpickle can pickle.
        """
        if self.rank == 0:
            self._send(event)

    def limited(self, seconds: float, what: str) -> AbstractContextManager[None]:
        """Put a hard time limit on a block; limits may be nested.

        At the limit, the stacks of all threads are written for the report and this process ends.

        Args:
            seconds: the limit.
            what: description of the block, for the report.

        Returns:
            A context manager around the block.
        """
        return self._limits.limited(seconds, what)


def under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank.

    Returns:
        False also if another launcher did.
    """
    return dist.is_torchelastic_launched()


def gpu_for_each_rank() -> bool:
    """Return whether each rank of this node has its own GPU."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return torch.cuda.is_available() and torch.cuda.device_count() >= local_size


@contextmanager
def joined(
    *, on_event: Callable[[object], None] = lambda _: None, timeout_s: float = COLLECTIVE_LIMIT_S
) -> Iterator[Ranks]:
    """Join the ranks that exist: those of the default process group, else torchrun's. Each must call it.

    An existing group is used and kept. Otherwise one is made, and destroyed at the end; an exception is
    written to standard error before that, since leaving a group may crash the process.

    Args:
        on_event: called on rank 0 with each event that rank 0 emits.
        timeout_s: limit of each gather, and of each collective in a group that is made here.

    Yields:
        This process's view of the ranks.

    Raises:
        UsageError: if there is neither a group nor torchrun, or gloo would not connect the machines.
        InfrastructureError: another rank cannot start, or they cannot connect.
    """
    limits = Limits()
    if dist.is_initialized():
        with _telling_peers(_view(limits, on_event, timeout_s)) as ranks:
            yield ranks
        return
    if not under_torchrun():
        raise UsageError(
            "expected ranks to join, got neither torchrun's environment nor a default process group. Start "
            "this with 'torchrun --nproc-per-node N', or use launch()."
        )
    if has_launched_peers():
        meeting().arrive(timeout_s, uses_gloo=not gpu_for_each_rank())
    # torchrun ends the peers of a failed rank; this makes them write their stacks.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    try:
        with grouped(timeout_s, limits=limits, send=on_event) as ranks:
            try:
                with keeping_record_of_launched(ranks.rank):
                    yield ranks
            except BaseException:
                sys.stderr.write(f"rank {ranks.rank} failed:\n{traceback.format_exc()}")
                sys.stderr.flush()
                raise
    finally:
        faulthandler.unregister(signal.SIGTERM)


@contextmanager
def grouped(
    timeout_s: float,
    seat: tuple[Any, int, int] | None = None,
    *,
    backend: str | None = None,
    limits: Limits | None = None,
    send: Callable[[object], None] = lambda _: None,
) -> Iterator[Ranks]:
    """Make the default process group, and destroy it at the end. Each rank must call it.

    Args:
        timeout_s: limit of each gather and each collective.
        seat: store, rank and size; by default taken from the environment.
        backend: ``"gloo"`` or ``"nccl"``; None for NCCL where each rank of this node has a GPU.
        limits: the limits of this process.
        send: called with each event that rank 0 emits.

    Yields:
        This process's view of the ranks.

    Raises:
        InfrastructureError: launched ranks cannot connect to each other.
    """
    backend = backend or ("nccl" if gpu_for_each_rank() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    where = {} if seat is None else dict(zip(("store", "rank", "world_size"), seat, strict=True))
    excepthook = sys.excepthook  # torch replaces it permanently when it makes a group
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)
    except BaseException as error:
        # Keep the next default group's name equal on all ranks: torch also counts a group it failed to make.
        # Private in torch; `destroy_process_group` does the same, but only for a group that was made.
        world: Any = dist.distributed_c10d._world
        world.group_count = 0
        if seat is None and isinstance(error, RuntimeError):
            raise InfrastructureError(_unconnected(backend, error)) from error
        raise
    ranks = _view(limits or Limits(), send, timeout_s)
    try:
        with _telling_peers(ranks):
            ranks.gather(None)  # gloo fails on a rank that still connects to one that has left
            yield ranks
    finally:
        sys.excepthook = excepthook
        if dist.is_initialized():
            with ranks.limited(LEAVING_LIMIT_S, "leaving the process group"):
                dist.destroy_process_group()


def _unconnected(backend: str, error: RuntimeError) -> str:
    """Say that launched ranks could not connect, and what to try."""
    reason = str(error).splitlines()[0]
    return (
        f"expected the ranks to connect to each other with {backend}, but rank {os.environ['RANK']} could "
        f"not: {reason}. Ranks on several machines need a network interface that leads to the others: set "
        f"{backend.upper()}_SOCKET_IFNAME on each machine"
    )


def new_group(limit_s: float, divided: Sequence[Sequence[int]] | None = None) -> dist.ProcessGroup:
    """Make a process group of all ranks, or this rank's part of them; every rank must call it.

    A rank that needs no peer may leave its group while a peer still connects to it. Gloo takes that for a
    crash (once in a thousand groups), so torch waits here until all have connected.

    Args:
        limit_s: limit of each collective.
        divided: the members of each part, if there are several.
    """
    timeout = timedelta(seconds=limit_s)
    c10d: Any = dist  # torch types only one of the functions
    with patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="1"):
        of_parts = divided and c10d.new_subgroups_by_enumeration(divided, timeout)
        group: dist.ProcessGroup = of_parts[0] if of_parts else dist.new_group(timeout=timeout)
    return group


@contextmanager
def one_rank() -> Iterator[None]:
    """Make a default process group of this process alone, unless one exists, and destroy it afterwards."""
    if dist.is_initialized():
        yield
        return
    c10d: Any = dist  # torch does not mark its re-exports
    with grouped(COLLECTIVE_LIMIT_S, (c10d.HashStore(), 0, 1), backend="gloo"):
        yield


@contextmanager
def _telling_peers(ranks: Ranks) -> Iterator[Ranks]:
    """Make sure that no peer waits for this rank if it fails."""
    try:
        yield ranks
    except BaseException:
        with suppress(Exception):  # the store may be gone; the first failure is the one to report
            ranks.leave()
        raise


def _view(limits: Limits, send: Callable[[object], None], timeout_s: float) -> Ranks:
    backend: str = dist.get_backend()
    on_gpu = "nccl" in backend or (backend == "undefined" and torch.cuda.is_available())
    if backend == "undefined" or ":" in backend:  # one for each device type
        backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    rank = dist.get_rank()
    size = dist.get_world_size()
    exchange = Exchange(_get_default_store(), rank, size, timeout_s)
    return Ranks(rank, size, device, backend, exchange, limits, send)
