"""What is known in a search: ranks tell it whenever it changes, and new ranks go on from it.

Plain data that travels between processes. Invariant: all that it says was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpopt.judge.locating.pieces import EVERYTHING, Part
from ddpopt.judge.locating.rungs import Stage, Symptom
from ddpopt.judge.locating.segment_code import Code
from ddpopt.judge.verdict import Rung
from ddpopt.ranks.failures import RankFailure


@dataclass(frozen=True)
class Trying:
    """What is about to be tried.

    Attributes:
        stage: which.
        part: what of it is compiled.
        exact: whether it is compared bit by bit; None while the ladder is climbed.
    """

    stage: Stage
    part: Part = EVERYTHING
    exact: bool | None = None


@dataclass(frozen=True)
class Blamed:
    """What has to be compiled for the difference to appear.

    Attributes:
        segments: in words; empty where the difference appears though nothing is compiled.
        code: the guilty part as source code; None if it has none.
        exact: whether only a comparison bit by bit shows it.
        note: what a reader should know.
        symptom: how it differs; None where that is not known.
    """

    segments: tuple[str, ...]
    code: Code | None = None
    exact: bool = False
    note: str = ""
    symptom: Symptom | None = None

    @property
    def kind(self) -> str:
        """How it differs, in one word; empty where that is not known."""
        return "" if self.symptom is None else self.symptom.kind

    @property
    def death(self) -> str:
        """Of what the process dies, if that is the difference."""
        return self.symptom.how if self.symptom is not None and self.kind == "died" else ""

    @property
    def samples(self) -> bool:
        """Whether numbers are compared that rounding may change."""
        return not self.exact and self.kind not in ("died", "run")


@dataclass
class Known:
    """What is known so far.

    Attributes:
        rungs: in the order in which they were tried.
        stage: the lowest that disagrees; None while the ladder is climbed.
        symptom: how it does.
        trying: what is being tried.
        symptoms: how that stage disagreed with each part compiled, compared bit by bit or not.
        blamed: what has to be compiled for it.
        notes: what a reader should know.
    """

    rungs: list[Rung] = field(default_factory=list)
    stage: Stage | None = None
    symptom: Symptom | None = None
    trying: Trying | None = None
    symptoms: dict[tuple[Part, bool], Symptom | None] = field(default_factory=dict)
    blamed: Blamed | None = None
    notes: list[str] = field(default_factory=list)

    def hear(self, told: object) -> None:
        """Take in what rank 0 knows."""
        vars(self).update(vars(told))

    def survive(self, first: RankFailure, ranks: int) -> bool:
        """Take in that ranks failed.

        Args:
            first: the failure that it began with.
            ranks: how many there were.

        Returns:
            Whether this is what a try does, so that new ranks can go on from here.
        """
        tried, how = self.trying, _how(first)
        if first.kind == "stalled":
            during = f" while {tried.stage.name} was tried" if tried else ""
            self.notes.append(f"the time was over before the search ended{during}")
        elif tried is None:
            self.notes.append(f"the search on {ranks} rank(s) ended early: {how}: {_last_line(first.stack)}")
        if first.kind == "stalled" or tried is None:
            return False
        symptom = Symptom("died", first.signal or f"exit code {first.exit_code}")
        if first.kind == "raised":
            symptom = Symptom("run", _last_line(first.stack).partition(":")[0])
        if tried.exact is None:
            self.rungs.append(Rung(tried.stage.name, agrees=False, detail=how))
            self.stage, self.symptom = tried.stage, symptom
        self.symptoms[tried.part, bool(tried.exact)] = symptom
        return True


def _how(failure: RankFailure) -> str:
    of = failure.signal or (f"exit code {failure.exit_code}" if failure.kind == "died" else "")
    return f"rank {failure.rank} {failure.kind}{f' of {of}' if of else ''}"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "without a word"
