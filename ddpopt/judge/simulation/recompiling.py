"""Find ranks that would compile in a step in which their peers do not, and so would keep them waiting.

Simulated ranks share what is compiled, so that a rank may find a graph that only another one needed. A rank
is suspect if its inputs change their form in a step and another rank's do not, or if it compiles what no rank
before it did; what it compiles on its own is then tried. Invariant: a suspicion alone is no finding.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ddpopt.judge.simulation.program import Why
from ddpopt.judge.simulation.shared_model import Taken
from ddpopt.judge.verdict import Finding

SAME_GRAPHS = "the same graphs on every rank, step by step"


@dataclass(frozen=True)
class Suspicion:
    """A rank that may compile alone.

    Attributes:
        step: index of the step.
        rank: the rank.
        peer: a rank that may not.
    """

    step: int
    rank: int
    peer: int

    def finding(self, compiled: Callable[[int, int], tuple[str, ...]], why: Why) -> Finding | None:
        """What is wrong if the rank does compile alone.

        Args:
            compiled: what a rank compiles in a step if it is on its own.
            why: says why two ranks take different ways.
        """
        theirs = compiled(self.rank, self.step)
        ours = compiled(self.peer, self.step)
        if theirs == ours:
            return None
        mine, other = (", ".join(ids) or "nothing" for ids in (theirs, ours))
        causes = (
            *why.branch(self.rank, self.peer, self.step),
            why.inputs(self.rank, self.peer, self.step),
        )
        message = (
            f"step {self.step}: rank {self.rank} would compile {mine}, rank {self.peer} {other}, and keep it "
            f"waiting; {'; '.join(causes)}"
        )
        return Finding("L3", SAME_GRAPHS, message, rank=self.rank, step=self.step)


class Recompilations:
    """Which ranks compiled, and whose inputs changed their form, in each step."""

    def __init__(self) -> None:
        self._known: dict[int, set[str]] = {}
        self._is_new: dict[int, bool] = {}
        self._compiled: list[int] = []

    def add(self, rank: int, taken: Taken) -> None:
        """Add a rank's step."""
        known = self._known.setdefault(rank, set())
        self._is_new[rank] = taken.form not in known
        known.add(taken.form)
        if taken.compiled:
            self._compiled.append(rank)

    def end(self, step: int) -> Suspicion | None:
        """End a step of all ranks; the first rank that may have compiled alone in it."""
        compiled = self._compiled
        self._compiled = []
        if step == 0 or not self._is_new:
            return None
        changed = [rank for rank, is_new in self._is_new.items() if is_new]
        steady = [rank for rank, is_new in self._is_new.items() if not is_new]
        if changed and steady:
            return Suspicion(step, changed[0], steady[0])
        if compiled and compiled[0] > 0:
            return Suspicion(step, compiled[0], 0)
        return None
