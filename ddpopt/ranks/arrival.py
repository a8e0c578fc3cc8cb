"""Where torchrun's ranks meet before they make a process group: can each of them start?

A rank that cannot, because a file or a module is on another machine only, would leave its peers waiting
inside torch for minutes. So would a rank whose host name means "this machine", as it often does in
``/etc/hosts``: gloo tells the other machines that address, and they find nobody there. Here every rank learns
of both.

Invariant: a rank arrives once, also if it cannot start. Needs no process group, only torchrun's store.
"""

import functools
import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ddpopt.errors import DdpoptError, InfrastructureError, UsageError, numbered
from ddpopt.ranks.exchange import Exchange, PeersMissing

FAILED_WAITS_S = 30.0
"""How long a rank that cannot start waits for its peers, so that a problem of all is told once."""
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Arrival:
    """What a rank says when it arrives.

    Attributes:
        problem: why it cannot start; empty if it can.
        address: this machine's address on the way to the first rank's; empty if that is not known.
        announced: the address that gloo tells other ranks; empty if gloo is not used.
    """

    problem: str
    address: str
    announced: str


class CannotStart(InfrastructureError):
    """Another rank cannot start."""


class Meeting:
    """The meeting of this job's ranks, as one of them sees it.

    Args:
        store: a store that all ranks share.
        rank: this process's rank.
        size: the number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._exchange = Exchange(PrefixStore("ddpopt/arrival", store), rank, size, FAILED_WAITS_S)
        self._rank = rank
        self._arrivals: list[Arrival] = []

    def arrive(self, limit_s: float, *, uses_gloo: bool) -> None:
        """Arrive, able to start; does nothing if this rank arrived before.

        Args:
            limit_s: how long to wait for the others, in seconds.
            uses_gloo: whether this rank will use gloo.

        Raises:
            CannotStart: another rank cannot start; the message has its reason.
            UsageError: gloo would not connect the machines.
            PeersMissing: a rank did not arrive in time.
        """
        if self._arrivals:
            return
        self._exchange_arrivals("", announced_by_gloo() if uses_gloo else "", limit_s)
        problem = self._problem()
        if problem is not None:
            raise problem

    def fail(self, problem: str) -> bool:
        """Tell the others that this rank cannot go on; who has not arrived learns it on arrival.

        Args:
            problem: the reason.

        Returns:
            Whether this rank tells people: a problem of all ranks is told once on each machine.
        """
        if not self._arrivals:
            with suppress(PeersMissing):
                self._exchange_arrivals(problem, "", FAILED_WAITS_S)
        if not self._problem():  # this one came later, and no other rank knows it
            return True
        own = self._arrivals[self._rank]
        alike = [(arrival.address, arrival.problem) for arrival in self._arrivals]
        return alike.index((own.address, own.problem)) == self._rank

    def gather(self, value: Any, limit_s: float) -> list[Any]:
        """Send every rank's value to every rank, after all arrived; each rank must call it.

        Args:
            value: anything that cloudpickle can pickle.
            limit_s: how long this rank waits, in seconds.

        Returns:
            The values, by rank.

        Raises:
            PeersMissing: a rank did not arrive in time.
        """
        values = self._exchange.gather(cloudpickle.dumps(value), limit_s)
        return [cloudpickle.loads(data) for data in values]

    def _problem(self) -> DdpoptError | None:
        """Why the ranks cannot start; None if they can, or if nothing is known of them."""
        for rank, arrival in enumerate(self._arrivals):
            if arrival.problem:
                return CannotStart(f"rank {rank} cannot start: {arrival.problem}")
        said = unreachable(self._arrivals)
        return UsageError(said) if said else None

    def _exchange_arrivals(self, problem: str, announced: str, limit_s: float) -> None:
        arrival = Arrival(problem, address_towards(os.environ["MASTER_ADDR"]), announced)
        self._arrivals = self.gather(arrival, limit_s)


@functools.cache
def meeting() -> Meeting:
    """The meeting of torchrun's ranks, of which this process is one."""
    c10d: Any = dist  # torch does not mark its re-exports
    limit = timedelta(seconds=FAILED_WAITS_S)
    store, rank, size = next(iter(c10d.rendezvous("env://", timeout=limit)))
    return Meeting(store, rank, size)


def tells(problem: str) -> bool:
    """Whether this rank of torchrun tells people of a problem of its own; the other ranks learn of it.

    Args:
        problem: why it cannot go on.
    """
    with suppress(RuntimeError):  # without torchrun's store nobody else can tell it
        return meeting().fail(problem)
    return True


def unreachable(arrivals: Sequence[Arrival]) -> str:
    """Say which ranks other machines cannot reach.

    Args:
        arrivals: of all ranks.

    Returns:
        What is wrong and what to do about it; empty if nothing is.
    """
    if len({arrival.address for arrival in arrivals}) == 1:
        return ""
    hidden = [rank for rank, arrival in enumerate(arrivals) if _is_loopback(arrival.announced)]
    if not hidden:
        return ""
    first = arrivals[hidden[0]]
    return (
        f"expected addresses that other machines can reach, but {numbered('rank', hidden)} would tell them "
        f"{first.announced}, which is what the host's own name means there. On each machine set {INTERFACE} "
        f"to the network interface that leads to the others (of rank {hidden[0]}: that of {first.address}); "
        "'ip -brief address' lists them"
    )


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def address_towards(host: str) -> str:
    """This machine's address on the way to a host; empty if there is no way. Nothing is sent."""
    with suppress(OSError):
        family, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as unsent:
            unsent.connect(where)
            return str(unsent.getsockname()[0])
    return ""


def announced_by_gloo() -> str:
    """The address that gloo tells other ranks where nobody names an interface; empty if one is named.

    As gloo does, it takes the first address of the host's own name that this machine has, else loopback.
    """
    if INTERFACE in os.environ:
        return ""
    with suppress(OSError):
        for family, kind, *_, where in socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as unused:
                unused.bind(where)
                return str(where[0])
    return "127.0.0.1"
