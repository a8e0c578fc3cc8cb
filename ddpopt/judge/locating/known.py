"""What is known in a search: ranks tell it whenever it changes, and new ranks go on from it.

Plain data that travels between processes. Invariant: all that it says was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddpopt.judge.locating.pieces import EVERYTHING
from ddpopt.judge.locating.rungs import Stage, Symptom
from ddpopt.judge.verdict import Rung
from ddpopt.ranks.failures import RankFailure


@dataclass(frozen=True)
class Try:
    """What may be tried.

    Attributes:
        stage: which.
        part: what of it is compiled.
        exact: whether it is compared bit by bit; None while the ladder is climbed.
    """

    stage: Stage
    part: range = EVERYTHING
    exact: bool | None = None


@dataclass
class Known:
    """What is known so far.

    Attributes:
        rungs: in the order in which they were tried.
        stage: the lowest that disagrees; None while the ladder is climbed.
        symptom: how it does.
        trying: what is being tried.
        symptoms: how each try disagreed that was made when the stage was known; None for one that agreed.
        segments: what has to be compiled for it, in words; empty if it appears though nothing is compiled.
        about_segments: what a reader should know of them.
        notes: what a reader should know of the search.
    """

    rungs: list[Rung] = field(default_factory=list)
    stage: Stage | None = None
    symptom: Symptom | None = None
    trying: Try | None = None
    symptoms: dict[Try, Symptom | None] = field(default_factory=dict)
    segments: tuple[str, ...] = ()
    about_segments: str = ""
    notes: list[str] = field(default_factory=list)

    def hear(self, told: object) -> None:
        """Take in what rank 0 knows."""
        vars(self).update(vars(told))

    def survive(self, first: RankFailure) -> bool:
        """Take in that ranks failed.

        Args:
            first: the failure that it began with.

        Returns:
            Whether this is what a try does, so that new ranks can go on from here.
        """
        tried, end = self.trying, first.signal or f"exit code {first.exit_code}"
        how = f"rank {first.rank} {first.kind}{f' of {end}' if first.kind == 'died' else ''}"
        if tried is None or first.kind == "stalled":
            during = f" while {tried.stage.name} was tried" if tried else ""
            why = f": {_last_line(first.stack)}" if first.kind == "raised" else ""
            self.notes.append(f"the search ended early{during}: {how}{why}")
            return False
        symptom = Symptom("died", end)
        if first.kind == "raised":
            symptom = Symptom("run", _last_line(first.stack).partition(":")[0])
        if tried.exact is None:
            self.rungs.append(Rung(tried.stage.name, agrees=False, detail=how))
            self.stage, self.symptom = tried.stage, symptom
        self.symptoms[replace(tried, exact=bool(tried.exact))] = symptom
        return True


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
