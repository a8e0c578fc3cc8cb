"""What ranks do to find where a trial goes wrong: climb the ladder, then narrow the difference down.

Each rung is judged as a trial is, against eager DDP of as many ranks. What is found is told as it is found,
so that a search which runs out of time, or whose ranks die, has said what it knows. A try that takes its
ranks down is an answer too: new ranks are told of it, and go on from there.

Invariant: equal knowledge leads to equal tries, on every rank and in every process that takes the search up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from ddpopt.dynamo.backend import find_compiler
from ddpopt.judge.backends import backend_of
from ddpopt.judge.judge import judge
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.locating.known import Blamed, Choice, Known, Trying
from ddpopt.judge.locating.narrow import narrowed
from ddpopt.judge.locating.pieces import ChosenPieces, Piece
from ddpopt.judge.locating.rungs import Question, Stage, Symptom, rung_of, symptom_of
from ddpopt.judge.locating.segment_code import NotWritable, Recorder
from ddpopt.judge.modes import LOCAL, Mode, mode
from ddpopt.judge.options import option
from ddpopt.judge.trainer import Option
from ddpopt.judge.trials import Settings, quickly
from ddpopt.judge.verdict import Trial
from ddpopt.ranks.group import Ranks

CUT_BY_MODE = ("torch", "ddpopt-split")
"""Modes that cut the graph themselves: their own segments are the pieces."""


class Search:
    """The ranks that look into one trial, with eager's runs made once.

    Args:
        ranks: on which this runs.
        question: the trial.
        time_left: how much time is left, in seconds.
        known: what is known already; grows.
    """

    def __init__(
        self, ranks: Ranks, question: Question, time_left: Callable[[], float], known: Known
    ) -> None:
        self.ranks = ranks
        self.question = question
        self.time_left = time_left
        self.known = known
        self.case = question.case() if ranks.size > 1 else question.case_of_rank()
        asked = option(question.option)
        with ExitStack() as benches:
            self.reference = self._eager(asked, benches)
            self._alone: Reference | None = None
            if self.reference is not None and ranks.size == 1 and asked.needs != "nothing":
                self._alone = self._eager(replace(asked, needs="nothing"), benches)
            elif ranks.size == 1:
                self._alone = self.reference
            self._benches = benches.pop_all()

    def close(self) -> None:
        """Give the process groups back."""
        self._benches.close()

    def _eager(self, asked: Option, benches: ExitStack) -> Reference | None:
        question = self.question
        subject = Subject(self.case, asked, question.steps, self.ranks.device, evaluates=question.evaluates)
        return Reference.make(
            benches.enter_context(closing(Bench(subject, self.ranks, Settings().collective_limit_s)))
        )

    def climb(self, stages: Sequence[Stage]) -> Stage | None:
        """Try stages until one disagrees.

        Args:
            stages: from the lowest upwards.

        Returns:
            The lowest that disagrees; None if none does.
        """
        for stage in stages:
            self.tell(Trying(stage))
            trial = self.trial(stage, backend_of(stage.backend))
            if trial is None:
                continue
            symptom = symptom_of(trial)
            found = self.question.is_shown_by(stage, symptom)
            self.known.rungs.append(rung_of(stage, trial))
            if found:
                self.known.stage, self.known.symptom = stage, symptom
            self.tell()
            if found:
                return stage
        return None

    def tell(self, trying: Trying | None = None) -> None:
        """Tell what is known, and what is about to be tried."""
        self.known.trying = trying
        self.ranks.emit(self.known)

    def blame(self, blamed: Blamed) -> None:
        """Tell what is to blame, as far as is known."""
        self.known.blamed = blamed
        self.tell()

    def trial(self, stage: Stage, backend: Any, *, exact: bool | None = None) -> Trial | None:
        """Judge one stage; None where eager itself cannot run it."""
        reference = self._alone if stage.mode == LOCAL.name else self.reference
        if reference is None:
            return None
        return judge(reference, _mode(stage), backend, exact=exact)

    def narrow(self, stage: Stage) -> None:
        """Find what has to be compiled for a stage to disagree, and tell it.

        Args:
            stage: one that disagrees.
        """
        if not stage.backend:
            self.blame(Blamed((), note="nothing is compiled in this mode"))
            return
        blamed, chosen = _Narrowing(self, stage).blame()
        self.blame(blamed)
        if stage.ranks == 1 and chosen:
            self.blame(self._with_code(stage, blamed, chosen))

    def _with_code(self, stage: Stage, blamed: Blamed, chosen: Sequence[Piece]) -> Blamed:
        recorder = Recorder(chosen, cuts=_cuts(stage))
        try:
            self.trial(stage, recorder, exact=False)
            return replace(blamed, code=recorder.code())
        except NotWritable as error:
            notes = [*filter(None, [blamed.note]), f"the segment has no source code: {error}"]
            return replace(blamed, note="; ".join(notes))


class _Narrowing:
    """Choosing pieces of one stage that disagrees: first among its graphs, then inside of each."""

    def __init__(self, search: Search, stage: Stage) -> None:
        self.search = search
        self.stage = stage
        self.compiler = find_compiler(backend_of(stage.backend))
        self.cuts = _cuts(stage)
        self.exact = False
        self.whole: Symptom | None = None
        self.listed = ChosenPieces(self.compiler)
        self.ended = True
        self.tries = 0

    def blame(self) -> tuple[Blamed, tuple[Piece, ...]]:
        """The smallest set of pieces, in words and as such."""
        self._find_whole()
        if self.whole is None:
            return Blamed(
                (), note="the difference did not appear again when pieces were about to be chosen"
            ), ()
        symptom = self._list(())
        if not self.listed.graphs or symptom == self.whole:
            note = "the difference appears though no piece is compiled"
            return Blamed((), exact=self.exact, symptom=self.whole, note=note), ()
        self.search.blame(self._blamed(tuple(self.listed.wholes), so_far=True))
        chosen = self._smallest(self.listed.wholes, ())
        for piece in chosen if self.cuts else ():
            others = tuple(other for other in chosen if other != piece)
            # asked anew for each graph: what a captured backward holds depends on what its forward compiles
            self._list(others)
            if piece.graph < len(self.listed.graphs):
                chosen = tuple(sorted((*others, *self._smallest(self.listed.pieces(piece.graph), others))))
        return self._blamed(chosen), chosen

    def _blamed(self, chosen: tuple[Piece, ...], *, so_far: bool = False) -> Blamed:
        notes = []
        if so_far or not self.ended:
            notes.append(f"the search ended early, after {self.tries} tries: fewer segments may do")
        if self.cuts and self.stage.mode != LOCAL.name:
            notes.append(
                f"the segments were cut for this search alone; {self.stage.mode} compiles each graph whole"
            )
        segments = self.listed.described(chosen)
        return Blamed(segments, exact=self.exact, symptom=self.whole, note="; ".join(notes))

    def _find_whole(self) -> None:
        """Everything compiled: first as far as rounding goes, then, if that shows nothing, bit by bit."""
        for exact in (False, True):
            self.exact, self.whole = exact, self._symptom(None, exact)
            if self.whole is not None:
                return

    def _list(self, chosen: tuple[Piece, ...]) -> Symptom | None:
        """Look what graphs there are, with a choice that is not expected to show anything."""
        known = self.search.known.choices.get((chosen, self.exact))
        if known is not None and known.kind == "died":
            return known
        listing = ChosenPieces(self.compiler, chosen, cuts=self.cuts)
        symptom = self._run(listing, chosen, self.exact)
        self.listed = listing
        return symptom

    def _smallest(self, pieces: Sequence[Piece], others: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The fewest of some pieces that show the difference together with others."""
        if not self.cuts:
            pieces = [Piece(piece.graph, 0) for piece in pieces]

        def shows(part: tuple[Piece, ...]) -> bool | None:
            chosen = tuple(sorted((*others, *part)))
            search = self.search
            if (chosen, self.exact) not in search.known.choices:
                # asked of all ranks, so that they end together
                if min(search.ranks.gather(search.time_left())) <= 0:
                    return None
                self.tries += 1
            if self._symptom(chosen, self.exact) != self.whole:
                return False
            search.blame(self._blamed(chosen, so_far=True))
            return True

        found = narrowed(pieces, shows)
        self.ended = self.ended and found.ended
        return found.items

    def _symptom(self, chosen: Choice, exact: bool) -> Symptom | None:
        known = self.search.known.choices
        if (chosen, exact) not in known:
            self._run(ChosenPieces(self.compiler, chosen, cuts=self.cuts), chosen, exact)
        return known[chosen, exact]

    def _run(self, backend: ChosenPieces, chosen: Choice, exact: bool) -> Symptom | None:
        search = self.search
        search.tell(Trying(self.stage, chosen, exact))
        trial = search.trial(self.stage, backend, exact=exact)
        symptom = None if trial is None else symptom_of(trial)
        search.known.choices[chosen, exact] = symptom
        search.tell()
        return symptom


def _cuts(stage: Stage) -> bool:
    """Whether graphs have to be cut for a search."""
    return stage.mode not in CUT_BY_MODE


def _mode(stage: Stage) -> Mode:
    return LOCAL if stage.mode == LOCAL.name else mode(stage.mode)


def search(ranks: Ranks, question: Question, stages: Sequence[Stage], seconds: float, known: Known) -> None:
    """Climb, and narrow down what is found; all is told by events. A collective of all ranks.

    Args:
        ranks: on which this runs.
        question: the trial.
        stages: yet to be tried, from the lowest upwards.
        seconds: how long new tries may begin.
        known: what ranks before these found out.
    """
    until = time.monotonic() + seconds
    with quickly(), closing(Search(ranks, question, lambda: until - time.monotonic(), known)) as running:
        stage = known.stage or running.climb(stages)
        if stage is not None:
            running.narrow(stage)
