"""What the structure of a run is judged by: this rank's records, and every rank's summary of its own.

Invariant: a summary holds no tensor, so exchanging it costs little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from torch import Tensor

from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.judging.record import Record
from ddpopt.judge.modes import Mode
from ddpopt.judge.trainer import Option
from ddpopt.observation.observe import Collective

Digests = tuple[dict[str, bytes], ...]
"""For each step, a digest of every parameter and buffer after it."""

Sent = tuple[str, int | None]
"""What of a collective must be the same on all ranks, and the bucket that it carried, where one is known."""


@dataclass(frozen=True)
class Peer:
    """What one rank tells the others of its run.

    Attributes:
        rank: in the group that trains together.
        states: digests after each step.
        graphs: Dynamo's compile ids, step by step.
        buckets: names of the parameters of each bucket, at each synchronised backward.
        collectives: on the DDP module's process group, in order: what of each must be the same on all ranks.
    """

    rank: int
    states: Digests
    graphs: tuple[tuple[str, ...], ...]
    buckets: tuple[tuple[tuple[str, ...], ...], ...]
    collectives: tuple[Sent, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What claims are judged by.

    Attributes:
        mode: the mode under test.
        option: the option.
        compiled: whether anything was to be compiled.
        got: this rank's run in the mode.
        eager: this rank's run in eager DDP.
        peers: every rank's run in the mode, by rank in the group.
        eager_peers: the same for eager.
        alone: the graphs that Dynamo makes of the model alone, after each step; None if that is not known.
        ranks_differ: whether ranks may run different graphs.
    """

    mode: Mode
    option: Option
    compiled: bool
    got: Record
    eager: Record
    peers: Sequence[Peer]
    eager_peers: Sequence[Peer]
    alone: Sequence[int] | None
    ranks_differ: bool


class Break(NamedTuple):
    """Where a claim does not hold: what was seen, of which parameter, in which step."""

    message: str
    parameter: str | None = None
    step: int | None = None

    @property
    def in_words(self) -> str:
        """The message, after the step."""
        return self.message if self.step is None else f"step {self.step}: {self.message}"


Broken = Iterator[Break]
Told = TypeVar("Told")
Claim = Callable[[Evidence], Broken]


def as_far(one: object, other: object) -> bool:
    """Whether two ranks tell the same, as far as both tell anything."""
    return one == other or None in (one, other)


def unlike(
    peers: Sequence[Peer],
    what: Callable[[Peer], Sequence[Told]],
    alike: Callable[[Told | None, Told | None], bool] = as_far,
) -> Iterator[tuple[int, int, Told | None, Told | None]]:
    """Where each rank first tells something else than the first rank does.

    Args:
        peers: the ranks.
        what: what they tell, in order.
        alike: whether two of these agree; None stands for what a rank tells no more.

    Yields:
        The rank, the index of what it tells there, that, and what the first rank tells.
    """
    for peer in peers[1:]:
        for index, (theirs, ours) in enumerate(zip_longest(what(peer), what(peers[0]))):
            if not alike(theirs, ours):
                yield peer.rank, index, theirs, ours
                break


def peer_of(rank: int, record: Record) -> Peer:
    """Sum up a run for the other ranks."""
    return Peer(
        rank=rank,
        states=tuple({name: _digest(t) for name, t in step.state.items()} for step in record.steps),
        graphs=tuple(
            record.graphs[before:after]
            for before, after in zip([0, *record.graphs_after], record.graphs_after, strict=False)
        ),
        buckets=tuple(tuple(bucket.params for bucket in one.buckets) for one in record.iterations or ()),
        collectives=tuple(_sent(c) for c in record.collectives if not c.op.startswith(ONE_SIDED)),
    )


ONE_SIDED = ("send", "recv")
"""Between two ranks: the others have none."""
UNEVEN = ("alltoall", "all_to_all", "gather", "scatter", "barrier")
"""Each rank may send another number of bytes."""


def _sent(collective: Collective) -> Sent:
    is_uneven = collective.op.startswith(UNEVEN)
    return collective.op if is_uneven else words_of(collective), collective.bucket


def words_of(collective: Collective) -> str:
    """Name a collective as far as its size goes."""
    return f"{collective.op} of {collective.nbytes} bytes of {collective.dtype}"


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=16).digest()
