"""The evidence for the claims on a run's structure: this rank's records, and every rank's summary.

Invariant: a summary holds no tensors, so ranks can send it to each other.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from ddpopt.judge.compare import raw_bytes
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.trainer import Option
from ddpopt.observation.events import Collective
from ddpopt.observation.launches import kind_of, words_of

ONE_SIDED = ("send", "recv", "isend", "irecv", "batch_p2p_ops")
"""Between two ranks; the other ranks have none."""
UNEVEN = ("alltoall", "all_to_all", "gather", "scatter", "barrier")
"""Each rank may send a different number of bytes."""
Told = TypeVar("Told")


@dataclass(frozen=True)
class Peer:
    """The summary of a run that one rank sends to the others.

    Attributes:
        rank: rank in the training group.
        states: for each step, a digest of every parameter and buffer after the step.
        graphs: Dynamo's compile ids, step by step.
        buckets: names of the parameters of each bucket, at each synchronized backward.
        collectives: the collectives on the DDP module's process group, in order, reduced to what must be
            equal on all ranks.
    """

    rank: int
    states: tuple[dict[str, bytes], ...]
    graphs: tuple[tuple[str, ...], ...]
    buckets: tuple[tuple[tuple[str, ...], ...], ...]
    collectives: tuple[str, ...] = ()


def peer_of(rank: int, record: Record) -> Peer:
    """Summarize a run for the other ranks."""
    return Peer(
        rank=rank,
        states=tuple({name: _digest(t) for name, t in step.state.items()} for step in record.steps),
        graphs=tuple(record.graphs[a:b] for a, b in itertools.pairwise([0, *record.graphs_after])),
        buckets=tuple(tuple(bucket.params for bucket in one.buckets) for one in record.iterations or ()),
        collectives=tuple(_sent(c) for c in record.collectives if not c.op.startswith(ONE_SIDED)),
    )


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=16).digest()


def _sent(collective: Collective) -> str:
    is_uneven = collective.op.startswith(UNEVEN)
    words = kind_of(collective) if is_uneven else words_of(collective)
    return words if collective.bucket is None else f"{words}, bucket {collective.bucket}"


@dataclass(frozen=True)
class RunEvidence:
    """The evidence for the claims.

    Attributes:
        mode: the mode under test.
        option: the option.
        compiled: whether anything should have been compiled.
        got: this rank's run in the mode.
        eager: this rank's run in eager DDP.
        rank: of this process in the group.
        peers: every rank's run in the mode, by rank in the group.
        eager_peers: the same for eager.
        alone: the number of graphs that Dynamo has compiled for the model alone after each step; None if
            unknown.
        ranks_differ: whether ranks may run different graphs.
        uncompiled: the collectives of each step of the same engine without a backend; None if they may be
            others.
    """

    mode: Engine
    option: Option
    compiled: bool
    got: Record
    eager: Record
    peers: Sequence[Peer]
    eager_peers: Sequence[Peer]
    alone: Sequence[int] | None
    ranks_differ: bool
    uncompiled: Sequence[tuple[str, ...]] | None = None
    rank: int = 0


class Break(NamedTuple):
    """A place where a claim does not hold: what was seen, for which parameter, and when."""

    message: str
    parameter: str | None = None
    moment: str | None = None

    @property
    def step(self) -> int | None:
        """The index of the training step; None for the whole run, and for what is run after the steps."""
        words = (self.moment or "").split()
        return int(words[1]) if words[:1] == ["step"] else None


Broken = Iterator[Break]


def unlike_first(
    peers: Sequence[Peer], what: Callable[[Peer], Sequence[Told]]
) -> Iterator[tuple[int, int, Told, Told]]:
    """Yield where each rank's summary first differs from rank 0's: rank, index, both values."""
    for peer in peers[1:]:
        for index, (theirs, ours) in enumerate(zip(what(peer), what(peers[0]), strict=False)):
            if theirs != ours:
                yield peer.rank, index, theirs, ours
                break
