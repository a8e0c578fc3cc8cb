"""Match what simulated ranks send to one rank with what that rank receives.

Invariant: a message without its other half is named once, for the first one of each pair of ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpopt.judge.simulation.world import RankSend
from ddpopt.observation.launches import Launch

FROM_ANYONE = "recv_any_source"
Pair = tuple[str, int, int]
"""A group, and the ranks that send and receive."""


@dataclass
class Messages:
    """The messages between two ranks in one step.

    Attributes:
        members: returns the ranks of each process group by its name; those that are missing have all ranks.
    """

    members: Callable[[], Mapping[str, Sequence[int]]]
    _sent: dict[Pair, list[RankSend]] = field(default_factory=dict)
    _received: dict[Pair, list[RankSend]] = field(default_factory=dict)
    _takes_any: set[tuple[str, int]] = field(default_factory=set)

    def add(self, rank: int, message: RankSend) -> None:
        """Add a message that a rank sends or receives."""
        launch = message.launch
        if launch.op == FROM_ANYONE:
            self._takes_any.add((launch.group, rank))
        elif launch.peer is not None:
            peer = self._rank(launch)
            if launch.op.endswith("send"):
                self._sent.setdefault((launch.group, rank, peer), []).append(message)
            else:
                self._received.setdefault((launch.group, peer, rank), []).append(message)

    def _rank(self, launch: Launch) -> int:
        """The rank at the other end, of which a group has its own number."""
        members = self.members().get(launch.group)
        assert launch.peer is not None
        return launch.peer if members is None else members[launch.peer]

    def unmatched(self) -> Iterator[tuple[Pair, int, RankSend | None, RankSend | None]]:
        """Yield pairs of ranks whose messages differ, with the index and both halves of the first one."""
        for pair in dict.fromkeys((*self._sent, *self._received)):
            group, _, receiver = pair
            if (group, receiver) in self._takes_any:
                continue
            sent = self._sent.get(pair, [])
            received = self._received.get(pair, [])
            for index in range(max(len(sent), len(received))):
                ours = sent[index] if index < len(sent) else None
                theirs = received[index] if index < len(received) else None
                if ours is None or theirs is None or _size(ours) != _size(theirs):
                    yield pair, index, ours, theirs
                    break

    @property
    def first(self) -> RankSend | None:
        """One of them; None if there is none."""
        lists = [*self._received.values(), *self._sent.values()]
        return lists[0][0] if lists else None


def _size(message: RankSend) -> tuple[int, str]:
    return message.launch.nbytes, message.launch.dtype
