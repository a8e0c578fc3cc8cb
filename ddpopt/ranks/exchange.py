"""Exchange values between ranks outside their process groups, through the store they met in.

The collectives of the program under test may be broken. A rank that failed may also have made fewer process
groups than its peers, so a new group would get a different number there. A store has neither problem: a rank
waits for a key, and the keys are numbered here.

Invariant: no rank waits longer than the limit, or for a rank that is known to have left; values that all
ranks have read are deleted.
"""

import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from ddpopt.errors import InfrastructureError

# torchrun's store accepts values of up to 8 MiB.
PIECE_BYTES = 2**22
FIRST_POLL_S = 0.0005
SLOWEST_POLL_S = 0.02
LEFT = "left"


class PeersMissing(InfrastructureError):
    """Another rank left, or did not arrive in time."""


class Exchange:
    """Rounds in which each rank contributes a value and receives the values of all ranks.

    All ranks must create the same number of exchanges, in the same order.
    """

    def __init__(self, store: Any, rank: int, size: int, limit_s: float) -> None:
        """Create the exchange; communicates with no rank yet.

        Args:
            store: a ``torch.distributed`` store that all ranks share.
            rank: this process's rank.
            size: the number of ranks.
            limit_s: the limit of each round, in seconds.
        """
        number = store.add(f"ddpopt/exchanges/{rank}", 1)
        self._store: Any = PrefixStore(f"ddpopt/exchange/{number}", store)
        self._rank = rank
        self._ranks = range(size)
        self._limit_s = limit_s
        self._round = 0

    def gather(self, value: bytes, limit_s: float | None = None) -> list[bytes]:
        """Send every rank's value to every rank; each rank must call it.

        Args:
            value: the value of this rank.
            limit_s: how long this rank waits, in seconds; by default the limit of each round.

        Returns:
            The values, by rank.

        Raises:
            PeersMissing: a rank left, or did not arrive in time.
        """
        self._round += 1
        self._put(value)
        limit_s = self._limit_s if limit_s is None else limit_s
        self._await([self._key(rank) for rank in self._ranks], limit_s)
        pieces = [int(self._store.get(self._key(rank))) for rank in self._ranks]
        values = [b"".join(map(self._store.get, self._keys(rank, pieces[rank]))) for rank in self._ranks]
        if self._store.add(f"{self._round} read", 1) == len(self._ranks):
            self._forget(pieces)
        return values

    def leave(self) -> None:
        """Announce to the other ranks that this one takes part in no further round."""
        self._store.set(LEFT, str(self._rank))

    def _key(self, rank: int) -> str:
        return f"{self._round} {rank}"

    def _keys(self, rank: int, count: int) -> list[str]:
        return [f"{self._key(rank)} {number}" for number in range(count)]

    def _put(self, value: bytes) -> None:
        starts = range(0, len(value), PIECE_BYTES)
        for key, start in zip(self._keys(self._rank, len(starts)), starts, strict=True):
            self._store.set(key, value[start : start + PIECE_BYTES])
        self._store.set(self._key(self._rank), str(len(starts)))  # written last, when the value is complete

    def _await(self, keys: Sequence[str], limit_s: float) -> None:
        """Poll instead of waiting inside C, so that stacks show this frame and lost ranks are noticed."""
        deadline = time.monotonic() + limit_s
        pause_s = FIRST_POLL_S
        while not self._store.check(list(keys)):
            # Checked before the keys: a rank that leaves in between may have written its value first.
            left = self._store.check([LEFT])
            late = time.monotonic() > deadline
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing and (left or late):
                why = f"no value arrived within {limit_s:g} s"
                raise self._missing(missing, f"rank {int(self._store.get(LEFT))} left" if left else why)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, SLOWEST_POLL_S)

    def _missing(self, missing: Sequence[int], why: str) -> PeersMissing:
        ranks = ", ".join(map(str, missing))
        return PeersMissing(
            f"expected a value from each of {len(self._ranks)} ranks, got none from {ranks}: {why}. Look at "
            "the first error of that rank; every rank must call gather() the same number of times."
        )

    def _forget(self, pieces: Sequence[int]) -> None:
        for rank in self._ranks:
            for key in (self._key(rank), *self._keys(rank, pieces[rank])):
                self._store.delete_key(key)
        self._store.delete_key(f"{self._round} read")
