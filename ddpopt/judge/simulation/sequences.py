"""Compare what simulated ranks would send: ranks that send something else than their peers wait for ever.

A collective is reduced to what must be equal on all ranks of its group: kind, size, dtype and place in the
order. Invariant: each rank that differs from most others is named, once for each way to differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpopt.errors import numbered
from ddpopt.judge.rules.evidence import ONE_SIDED, UNEVEN
from ddpopt.judge.simulation.messages import Messages
from ddpopt.judge.simulation.world import RankSend
from ddpopt.observation.launches import kind_of, words_of

NOTHING = "nothing"
Words = tuple[tuple[str, str], ...]
"""Of each collective the name of its group, and what must be equal on the ranks of that group."""


@dataclass(frozen=True)
class Parting:
    """A way in which some ranks send something else than the others.

    Attributes:
        ranks: the ranks that do.
        peers: the ranks that they are compared with, of which there are more.
        index: the first collective that differs, from 0.
        theirs: what they send there; None for nothing more.
        ours: what their peers send there; None for nothing more.
        counts: how many collectives they send, and how many their peers send.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]
    index: int
    theirs: RankSend | None
    ours: RankSend | None
    counts: tuple[int, int]

    def __str__(self) -> str:
        first = self.ranks[0]
        theirs, ours = self.counts
        return (
            f"{numbered('rank', self.ranks)} would send {theirs} collectives, "
            f"{numbered('rank', self.peers)} {ours}; the first difference is collective {self.index}: "
            f"{sent_in_words(self.theirs)} on rank {first}, {sent_in_words(self.ours)} on rank "
            f"{self.peers[0]}"
        )


class Unmatched(Parting):
    """A message from one rank to another, which one of them sends and the other does not receive."""

    def __str__(self) -> str:
        sender = self.ranks[0]
        receiver = self.peers[0]
        return (
            f"message {self.index} from rank {sender} to rank {receiver}: "
            f"{sent_in_words(self.theirs)} on the one, {sent_in_words(self.ours)} on the other"
        )


class Sequences:
    """What each rank sends in one step.

    Args:
        members: returns the ranks of each process group by its name; those that are missing have all ranks.

    Attributes:
        messages: what two ranks send each other, without the others.
    """

    def __init__(self, members: Callable[[], Mapping[str, Sequence[int]]]) -> None:
        self._members = members
        self.messages = Messages(members)
        self._ranks: dict[Words, list[int]] = {}
        self._sent: dict[Words, Sequence[RankSend]] = {}

    def add(self, rank: int, sent: Sequence[RankSend]) -> None:
        """Add what one rank sends, in order."""
        words, known = _words(sent)
        for one in sent:
            if one.launch.op.startswith(ONE_SIDED):
                self.messages.add(rank, one)
        self._ranks.setdefault(words, []).append(rank)
        self._sent.setdefault(words, known)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks so far send the same to all."""
        return not any(self._of_collectives())

    def would_be_equal(self, sent: Sequence[RankSend]) -> bool:
        """Whether all ranks still send the same if one more sends this."""
        return not self._ranks or _words(sent)[0] in self._ranks

    def partings(self) -> Iterator[Parting]:
        """Yield each way in which ranks differ from the most common one, and messages without a match."""
        yield from self._of_collectives()
        for (_, sender, receiver), index, sent, received in self.messages.unmatched():
            counts = int(sent is not None), int(received is not None)
            yield Unmatched((sender,), (receiver,), index, sent, received, counts)

    def _of_collectives(self) -> Iterator[Parting]:
        if len(self._ranks) < 2:
            return
        common = max(self._ranks, key=lambda words: (len(self._ranks[words]), -self._ranks[words][0]))
        for words in self._ranks:
            parting = None if words == common else self._compared(words, common)
            if parting is not None:
                yield parting
        seen = self._ranks[common][0]
        for group, members in self._members().items():
            if seen not in members:
                yield from self._within(group, members)

    def _within(self, group: str, members: Sequence[int]) -> Iterator[Parting]:
        """The same for a group that the most common ranks are no members of."""
        own = Sequences(dict)
        for words, ranks in self._ranks.items():
            for rank in set(ranks) & {*members}:
                own.add(rank, [one for one in self._sent[words] if one.launch.group == group])
        yield from own.partings()

    def _compared(self, words: Words, common: Words) -> Parting | None:
        """The first difference, among the collectives that a rank of each kind takes part in."""
        pair = {self._ranks[words][0], self._ranks[common][0]}
        theirs, ours = (self._in_common(each, pair) for each in (words, common))
        longest = max(len(theirs), len(ours))
        for index in range(longest):
            mine = theirs[index] if index < len(theirs) else None
            other = ours[index] if index < len(ours) else None
            if mine is None or other is None or _in_group(mine) != _in_group(other):
                counts = len(theirs), len(ours)
                return Parting(
                    tuple(self._ranks[words]), tuple(self._ranks[common]), index, mine, other, counts
                )
        return None

    def _in_common(self, words: Words, pair: set[int]) -> list[RankSend]:
        def is_shared(one: RankSend) -> bool:
            members = self._members().get(one.launch.group)
            return members is None or pair <= {*members}

        return [one for one in self._sent[words] if is_shared(one)]


def _words(sent: Sequence[RankSend]) -> tuple[Words, list[RankSend]]:
    """What must be equal, and the collectives that it is of: all but those between two ranks."""
    known = [one for one in sent if not one.launch.op.startswith(ONE_SIDED)]
    return tuple(map(_in_group, known)), known


def _in_group(one: RankSend) -> tuple[str, str]:
    return one.launch.group, _must_be_equal(one)


def _must_be_equal(one: RankSend) -> str:
    launch = one.launch
    return kind_of(launch) if launch.op.startswith(UNEVEN) else words_of(launch)


def sent_in_words(one: RankSend | None) -> str:
    """Describe a collective, with the line of the user's code that sends it."""
    if one is None:
        return NOTHING
    launch = one.launch
    where = one.where or ("the reducer, in backward" if launch.in_backward else "DDP, before the forward")
    return f"{words_of(launch)} ({where})"
