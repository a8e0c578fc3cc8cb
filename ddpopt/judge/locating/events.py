"""What ranks tell of a search while it runs, and what new ranks are told of it.

Plain data that travels between processes. Invariant: what an event says was seen, also if nothing follows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpopt.judge.locating.pieces import Piece
from ddpopt.judge.locating.rungs import Stage, Symptom
from ddpopt.judge.locating.segment_code import Code
from ddpopt.judge.verdict import Rung

Choice = tuple[Piece, ...] | None
"""What is compiled of a model; None for all of it."""


@dataclass(frozen=True)
class Trying:
    """An event: a stage is about to be tried.

    Attributes:
        stage: which.
        chosen: what of it is compiled.
        exact: whether it is compared bit by bit; None while the ladder is climbed.
    """

    stage: Stage
    chosen: Choice = None
    exact: bool | None = None


@dataclass(frozen=True)
class Tried:
    """An event: a stage of the ladder was tried.

    Attributes:
        stage: which.
        rung: how it went.
        symptom: how it disagreed, if it did.
    """

    stage: Stage
    rung: Rung
    symptom: Symptom | None


@dataclass(frozen=True)
class Chose:
    """An event: a choice of pieces was tried.

    Attributes:
        chosen: what was compiled.
        exact: whether it was compared bit by bit.
        symptom: how it disagreed, if it did.
    """

    chosen: Choice
    exact: bool
    symptom: Symptom | None


@dataclass(frozen=True)
class Blamed:
    """An event: what has to be compiled for the difference to appear.

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
    def crashes(self) -> bool:
        """Whether there are no numbers to compare."""
        return self.kind in ("died", "run")

    @property
    def samples(self) -> bool:
        """Whether numbers are compared that rounding may change."""
        return not self.exact and not self.crashes


@dataclass
class Memory:
    """What is known of a stage that disagrees, for ranks that take the search up.

    Attributes:
        stage: which; None while the ladder is climbed.
        choices: how it disagreed with each choice of pieces, compared bit by bit or not.
    """

    stage: Stage | None = None
    choices: dict[tuple[Choice, bool], Symptom | None] = field(default_factory=dict)
