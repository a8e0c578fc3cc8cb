"""Compare what ranks sent, and say where they part.

Invariant: what one rank's dump alone shows is never called a difference.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ddpopt.errors import InfrastructureError, UsageError, VerificationError, numbered
from ddpopt.hang.flights import Flight, RecordedCollective

MAY_DIFFER = ("all_to_all", "all_to_allv", "alltoall", "alltoall_base", "gather", "scatter")
"""Collectives whose ranks may send different sizes."""
Group = tuple[str, tuple[int, ...]]
"""The name of a process group and its ranks, as parts of a job may have groups of one name."""


@dataclass(frozen=True)
class Divergence:
    """The first collective of a group in which ranks differ.

    Attributes:
        group: name of the process group.
        number: its sequence number in the group.
        entered: for each rank that entered it, what it sent.
        missing: ranks that are in the group and did not enter it, each with the last that it entered; None if
            it entered none.
        waits: whether all entered it alike, and it has not completed on some.
    """

    group: str
    number: int
    entered: Mapping[int, RecordedCollective]
    missing: Mapping[int, RecordedCollective | None]
    waits: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f"group {self.group}, collective {self.number}"
        alike: dict[tuple[str, str], list[int]] = {}
        for rank, sent in self.entered.items():
            alike.setdefault((str(sent), sent.line), []).append(rank)
        if self.waits:
            what, line = next(iter(alike))
            waiting = numbered("rank", self.waits)
            text = f"{where}: all ranks entered {what}{_at(line)}, and it has not completed on {waiting}"
            if len(self.waits) == len(self.entered):
                text += "; none is missing, so look at the network between them"
            return text
        sides = [f"{numbered('rank', ranks)} sent {what}{_at(line)}" for (what, line), ranks in alike.items()]
        behind: dict[RecordedCollective | None, list[int]] = {}
        for rank, last in self.missing.items():
            behind.setdefault(last, []).append(rank)
        for last, ranks in behind.items():
            have = "has" if len(ranks) == 1 else "have"
            before = f"the last before was {last.number}, {last}{_at(last.line)}" if last else "nor another"
            sides.append(f"{numbered('rank', ranks)} {have} not entered it; {before}")
        return f"{where}: {'; '.join(sides)}"


def _at(line: str) -> str:
    return f" ({line})" if line else ""


def described(sent: RecordedCollective | None) -> str:
    """A collective with its group, its number and the user's line."""
    return f"group {sent.group}, collective {sent.number}, {sent}{_at(sent.line)}" if sent else "none"


@dataclass(frozen=True)
class Hang:
    """Where ranks hang.

    Attributes:
        divergences: one for each group whose ranks differ; first those in which a rank sent something else.
        absent: ranks that left no dump.
        last: the last collective of each rank that left one.
    """

    divergences: tuple[Divergence, ...]
    absent: tuple[int, ...]
    last: Mapping[int, RecordedCollective | None]

    def __str__(self) -> str:
        lines = [str(divergence) for divergence in self.divergences]
        if self.absent:
            lines.append(
                f"{numbered('rank', self.absent)} left no dump: ended, stopped, or not to be reached"
            )
        if not self.divergences:
            lines.append("the ranks with a dump entered the same collectives; the last of each:")
            lines += [f"  rank {rank}: {described(sent)}" for rank, sent in self.last.items()]
        return "\n".join(lines)

    @property
    def exit_code(self) -> int:
        """1 if ranks differ, wait, or left no dump; 3 if nothing is known to be wrong."""
        is_known = bool(self.divergences or self.absent)
        return VerificationError.exit_code if is_known else InfrastructureError.exit_code

    def to_json(self) -> str:
        """Return the diagnosis as a JSON object."""
        return json.dumps(asdict(self) | {"text": str(self)}, indent=2)


def diagnose(flights: Sequence[Flight], size: int | None = None) -> Hang:
    """Find where ranks part.

    Args:
        flights: what the recorder of each rank holds.
        size: the number of ranks of the job; by default one more than the largest rank with a dump.

    Returns:
        The first difference in each group.

    Raises:
        UsageError: the size is not positive.
    """
    if size is not None and size < 1:
        raise UsageError(f"world_size: expected a positive number, got {size}")
    ranks = tuple(sorted(flight.rank for flight in flights))
    size = size or (ranks[-1] + 1 if ranks else 0)
    groups: dict[Group, dict[int, dict[int, RecordedCollective]]] = {}
    for flight in flights:
        for sent in flight.sent:
            group = (sent.group, _members(sent.group, flight.rank, flights))
            groups.setdefault(group, {}).setdefault(flight.rank, {})[sent.number] = sent
    for (_, members), sent_by in groups.items():
        for rank in members:
            if rank in ranks:
                sent_by.setdefault(rank, {})
    compared = [_divergence(name, sent_by) for (name, _), sent_by in groups.items() if len(sent_by) > 1]
    divergences = sorted((one for one in compared if one is not None), key=_gravity)
    absent = tuple(rank for rank in range(size) if rank not in ranks)
    last = {flight.rank: flight.sent[-1] if flight.sent else None for flight in flights}
    return Hang(tuple(divergences), absent, last)


def _members(group: str, rank: int, flights: Sequence[Flight]) -> tuple[int, ...]:
    """The ranks of a rank's group, if any dump says so."""
    known = (flight.groups.get(group, ()) for flight in flights)
    return next((members for members in known if rank in members), ())


def _gravity(divergence: Divergence) -> tuple[bool, bool]:
    """Smaller for what more likely keeps the others waiting."""
    kinds = {_signature(sent) for sent in divergence.entered.values()}
    return bool(divergence.waits), len(kinds) < 2


def _divergence(group: str, members: Mapping[int, Mapping[int, RecordedCollective]]) -> Divergence | None:
    """The first difference in a group, among the collectives that all recorders still hold."""
    first = max(min(numbers, default=1) for numbers in members.values())
    last = max(max(numbers, default=1) for numbers in members.values())
    for number in range(first, last + 1):
        entered = {rank: numbers[number] for rank, numbers in members.items() if number in numbers}
        missing = {
            rank: numbers[max(numbers)] if numbers else None
            for rank, numbers in members.items()
            if number not in numbers
        }
        if missing or len({_signature(sent) for sent in entered.values()}) > 1:
            return Divergence(group, number, entered, missing)
    for number in range(first, last + 1):
        entered = {rank: numbers[number] for rank, numbers in members.items()}
        waits = tuple(sorted(rank for rank, sent in entered.items() if sent.is_over is False))
        if waits:
            return Divergence(group, number, entered, {}, waits)
    return None


def _signature(sent: RecordedCollective) -> tuple[str, str]:
    """What must be alike on all ranks."""
    return sent.kind, "" if sent.kind in MAY_DIFFER else sent.tensors
