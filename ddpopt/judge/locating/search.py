"""The search for where a trial goes wrong: climb the ladder, then narrow the difference down.

Each rung is judged on ranks as a trial is, against eager DDP of as many ranks. A try that takes its ranks
down is an answer too: the next one gets new ranks.

Invariant: whatever ends a search early, it has what was known by then, with a note that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpopt.errors import InfrastructureError
from ddpopt.judge.locating.narrow import narrowed
from ddpopt.judge.locating.pieces import Piece, Seen, all_pieces, described
from ddpopt.judge.locating.rungs import Question, Stage, Symptom
from ddpopt.judge.locating.segment_code import Code
from ddpopt.judge.locating.tries import Reply, prepare, try_pieces, try_stage, write_pieces
from ddpopt.judge.modes import LOCAL
from ddpopt.judge.verdict import Rung
from ddpopt.ranks.failures import RankFailure, RanksFailed

Ask = Callable[..., Any]
"""Has ranks run a function of `ddpopt.judge.locating.tries`, and returns what the first one returns."""


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
    def crashes(self) -> bool:
        """Whether there are no numbers to compare."""
        return self.kind in ("died", "run")

    @property
    def samples(self) -> bool:
        """Whether numbers are compared that rounding may change."""
        return not self.exact and not self.crashes


class Search:
    """What is known of where a trial goes wrong.

    Args:
        question: the trial.
        has_time: whether there is time to try another choice of pieces.

    Attributes:
        rungs: in the order in which they were tried.
        stage: the lowest that disagrees.
        symptom: how it does.
        blamed: what has to be compiled for it.
        notes: what a reader should know.
    """

    def __init__(self, question: Question, has_time: Callable[[], bool]) -> None:
        self.question = question
        self.rungs: list[Rung] = []
        self.stage: Stage | None = None
        self.symptom: Symptom | None = None
        self.blamed = Blamed(())
        self.notes: list[str] = []
        self._has_time = has_time

    def run(self, ask: Ask, stages: Iterable[Stage]) -> None:
        """Climb, and narrow down what is found.

        Args:
            ask: of ranks of one number.
            stages: for that number, from the lowest upwards.
        """
        try:
            ask(prepare)
            for stage in stages:
                if self._disagrees(ask, stage):
                    self.blamed = Blamed((), symptom=self.symptom)
                    self._narrow(ask, stage)
                    return
        except (InfrastructureError, OSError) as error:
            self.notes.append(f"the search ended early: {str(error).partition(chr(10))[0]}")

    def _disagrees(self, ask: Ask, stage: Stage) -> bool:
        answer = _asked(ask, stage, try_stage)
        if answer.rung is not None:
            self.rungs.append(answer.rung)
        if not self.question.is_shown_by(stage, answer.symptom):
            return False
        self.stage, self.symptom = stage, answer.symptom
        return True

    def _narrow(self, ask: Ask, stage: Stage) -> None:
        """Find what has to be compiled for a stage to disagree."""
        if not stage.backend:
            self.blamed = replace(self.blamed, note="nothing is compiled in this mode")
            return
        whole, exact = self._whole(ask, stage)
        if whole is None:
            note = "the difference did not appear again when pieces were about to be chosen"
            self.blamed = Blamed((), note=note)
            return
        self.blamed = Blamed((), exact=exact, symptom=whole)
        nothing = _asked(ask, stage, try_pieces, (), exact)
        if not nothing.graphs or nothing.symptom == whole:
            self.blamed = replace(self.blamed, note="the difference appears though no piece is compiled")
            return
        chosen = self._smallest(ask, stage, nothing.graphs)
        if stage.ranks == 1:
            code = ask(write_pieces, stage, chosen)
            if isinstance(code, Code):
                self.blamed = replace(self.blamed, code=code)
            else:
                self.blamed = replace(self.blamed, note="; ".join(filter(None, (self.blamed.note, code))))

    def _smallest(self, ask: Ask, stage: Stage, graphs: Sequence[Seen]) -> tuple[Piece, ...]:
        """Blame ever fewer pieces, as long as the difference stays the same."""

        def blame(chosen: Sequence[Piece], *, ended: bool) -> None:
            segments = described(graphs, chosen, cuts=stage.cuts)
            self.blamed = replace(self.blamed, segments=segments, note=_note(stage, ended))

        def shows(chosen: tuple[Piece, ...]) -> bool | None:
            if not self._has_time():
                return None
            answer = _asked(ask, stage, try_pieces, chosen, self.blamed.exact)
            if answer.symptom != self.blamed.symptom:
                return False
            blame(chosen, ended=False)
            return True

        pieces = all_pieces(graphs)
        blame(pieces, ended=False)
        smallest = narrowed(pieces, shows)
        blame(smallest.items, ended=smallest.ended)
        return smallest.items

    def _whole(self, ask: Ask, stage: Stage) -> tuple[Symptom | None, bool]:
        """How everything compiled disagrees: as far as rounding goes, else bit by bit."""
        if self.symptom is not None and self.symptom.kind == "died":
            return self.symptom, False
        for exact in (False, True):
            symptom = _asked(ask, stage, try_pieces, None, exact).symptom
            if symptom is not None:
                return symptom, exact
        return None, False


def _note(stage: Stage, ended: bool) -> str:
    notes = [] if ended else ["the search ended early: fewer segments may do"]
    if stage.cuts and stage.mode != LOCAL.name:
        notes.append(f"the segments were cut for this search alone; {stage.mode} compiles each graph whole")
    return "; ".join(notes)


def _asked(ask: Ask, stage: Stage, task: Callable[..., Reply], *more: object) -> Reply:
    """Try a stage. Ranks that fail meanwhile are what it does, unless the time was over."""
    try:
        answer: Reply = ask(task, stage, *more)
    except RanksFailed as failed:
        first = failed.culprits[0]
        if first.kind == "stalled":
            raise InfrastructureError(f"the time was over while {stage.name} was tried") from failed
        return Reply(_symptom(first), Rung(stage.name, agrees=False, detail=_how(first)))
    return answer


def _symptom(failure: RankFailure) -> Symptom:
    if failure.kind == "raised":
        return Symptom("run", failure.stack.strip().rpartition("\n")[2].partition(":")[0])
    return Symptom("died", failure.signal or f"exit code {failure.exit_code}")


def _how(failure: RankFailure) -> str:
    of = failure.signal or (f"exit code {failure.exit_code}" if failure.kind == "died" else "")
    return f"rank {failure.rank} {failure.kind}{f' of {of}' if of else ''}"
