"""What an observation holds: collectives, and the backwards that launched them.

Invariant: frozen; nothing here refers to a module or a tensor.
"""

from dataclasses import dataclass

from ddpopt.observation.reducer_buckets import ObservedBucket


@dataclass(frozen=True)
class Collective:
    """A collective on the module's process group.

    Attributes:
        op: ``"allreduce"``, ``"broadcast"``, …
        nbytes: bytes that this rank sent; for a sparse gradient, the size of a dense one.
        dtype: of the data sent, for instance ``"float32"``; empty for a barrier.
        bucket: index of the bucket that it carried; None if it carried something else, or if a communication
            hook sent the bucket with another size.
        how: its reduction and root, such as ``"max"`` or ``"from rank 1"``; empty for a sum.
    """

    op: str
    nbytes: int
    dtype: str
    bucket: int | None
    how: str = ""


@dataclass(frozen=True)
class Iteration:
    """One backward that launched collectives.

    Attributes:
        buckets: the reducer's buckets at the time; empty if no longer known (the reducer was replaced more
            than once in the block).
        collectives: the collectives that the backward launched, in order.
    """

    buckets: tuple[ObservedBucket, ...]
    collectives: tuple[Collective, ...]

    @property
    def unmatched(self) -> tuple[int, ...]:
        """Buckets without a collective of their size.

        Empty unless a communication hook sends something else, or unused buckets were skipped.
        """
        matched = [collective.bucket for collective in self.collectives]
        return tuple(bucket.index for bucket in self.buckets if bucket.index not in matched)
