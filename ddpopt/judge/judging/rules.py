"""Which level of the ladder judges which number.

That follows from what the number depends on, from the backend, and from whether a sum over ranks has one
order only. Invariant: every number has a level.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddpopt.judge.judging.numbers import Kind, plain


@dataclass(frozen=True)
class Rules:
    """What may be asked of the numbers of a trial; the same on every rank.

    Attributes:
        exact: whether operations run as in eager, in its order.
        ordered: whether a sum over ranks has one order only.
        means: whether gradients are means of what each rank computes alone, and that is known.
        shards: whether norms are computed over shards, hence in another order.
        finishes: whether an option changes gradients before the optimizer takes them.
        ignored: names of parameters that DDP leaves alone, and no other reducer takes: each rank keeps its
            own gradient.
        unstable: names of what eager does not reproduce.
        written: names of parameters that something else than the optimizer writes to.
        excused: names of gradients that may be summed in another order.
    """

    exact: bool
    ordered: bool
    means: bool
    shards: bool = False
    finishes: bool = False
    ignored: frozenset[str] = frozenset()
    unstable: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    excused: frozenset[str] = frozenset()

    def levels(self, kind: Kind, name: str) -> tuple[str, ...]:
        """The levels that judge a number.

        Args:
            kind: what it depends on.
            name: of the number.

        Returns:
            At least one. A parameter at L0 is compared with what the optimizer makes of its own gradient,
            which is judged itself; what eager does not reproduce is left to L2.
        """
        equal = self.exact and self.ordered
        if kind is Kind.PARAMETER and plain(name) not in self.written:
            return ("L0",)
        if plain(name) in self.unstable or plain(name) in self.excused:
            return ("L2",)
        if kind is Kind.OWN and self.excused:  # which of them depend on those values nobody knows
            return ("L2",)
        if kind in (Kind.FORWARD, Kind.OWN) or (kind is Kind.GRADIENT and name in self.ignored):
            return ("L0",) if self.exact else ("L2",)
        if kind is Kind.GRADIENT and self.exact and self.means:
            return ("L0", "L1") if self.ordered else ("L1",)
        if kind is Kind.FINISHED and (self.shards or self.excused):
            return ("L2",)
        return ("L0",) if equal else ("L2",)

    @property
    def need_rounding(self) -> bool:
        """Whether anything may come to be judged at L2."""
        if not self.exact or self.unstable or self.excused or (self.shards and self.finishes):
            return True
        return not self.ordered and (not self.means or self.finishes or bool(self.written))
