"""What ranks do to find where a trial goes wrong: climb the ladder, then narrow the difference down.

Each rung is judged as a trial is, against eager DDP of as many ranks. What is found is told as it is found,
so that a search which runs out of time, or whose ranks die, has said what it knows. A try that takes its
ranks down is an answer too: new ranks are told of it, and go on from there.

Invariant: equal knowledge leads to equal tries, on every rank and in every process that takes the search up.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from ddpopt.dynamo.backend import find_compiler
from ddpopt.judge.backends import backend_of
from ddpopt.judge.judge import judge
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.locating.known import Blamed, Known, Trying
from ddpopt.judge.locating.pieces import EVERYTHING, NOTHING, ChosenPieces, Part, whole
from ddpopt.judge.locating.rungs import Question, Stage, Symptom, rung_of, symptom_of
from ddpopt.judge.locating.segment_code import Recorder
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
        blamed, part = _Narrowing(self, stage).blame()
        self.blame(blamed)
        if stage.ranks == 1 and part is not None:
            recorder = Recorder()
            self.trial(stage, ChosenPieces(recorder, part, cuts=_cuts(stage)), exact=False)
            self.blame(replace(blamed, code=recorder.code()))


class _Narrowing:
    """Choosing a part of one stage that disagrees: first among its graphs, then inside of them."""

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

    def blame(self) -> tuple[Blamed, Part | None]:
        """The smallest part, in words and as such."""
        for self.exact in (False, True):  # as far as rounding goes; then, if that shows nothing, bit by bit
            self.whole = self._symptom(EVERYTHING)
            if self.whole is not None:
                break
        else:
            return Blamed(
                (), note="the difference did not appear again when pieces were about to be chosen"
            ), None
        listing = ChosenPieces(self.compiler, NOTHING, cuts=self.cuts)
        seen = self.search.known.symptoms.get((NOTHING, self.exact))
        symptom = seen if seen is not None and seen.kind == "died" else self._run(listing)
        if symptom == self.whole or not listing.graphs:
            note = "the difference appears though no piece is compiled"
            return Blamed((), exact=self.exact, symptom=self.whole, note=note), None
        self.listed = listing
        self.search.blame(self._blamed(EVERYTHING, so_far=True))
        part = self._smallest([whole(graph, graph) for graph in range(len(listing.graphs))])
        if self.cuts:
            part = self._smallest([Part(piece, piece) for piece in self.listed.pieces(part)])
        return self._blamed(part), part

    def _blamed(self, part: Part, *, so_far: bool = False) -> Blamed:
        notes = []
        if so_far or not self.ended:
            notes.append(f"the search ended early, after {self.tries} tries: fewer segments may do")
        if self.cuts and self.stage.mode != LOCAL.name:
            notes.append(
                f"the segments were cut for this search alone; {self.stage.mode} compiles each graph whole"
            )
        segments = self.listed.described(part)
        return Blamed(segments, exact=self.exact, symptom=self.whole, note="; ".join(notes))

    def _smallest(self, units: Sequence[Part]) -> Part:
        """The neighbours that suffice, of which all are known to: the first place to end, the last to begin.

        By bisection, so that all of them came to be seen to show it. After the time is over nothing does.
        """

        def shows(first: int, last: int) -> bool:
            part, search = Part(units[first].first, units[last].last), self.search
            if (part, self.exact) not in search.known.symptoms:
                # asked of all ranks, so that they end together
                if min(search.ranks.gather(search.time_left())) <= 0:
                    self.ended = False
                    return False
                self.tries += 1
            if self._symptom(part) != self.whole:
                return False
            search.blame(self._blamed(part, so_far=True))
            return True

        last = bisect_left(range(len(units) - 1), True, key=lambda last: shows(0, last))
        first = bisect_left(range(1, last + 1), True, key=lambda first: not shows(first, last))
        return Part(units[first].first, units[last].last)

    def _symptom(self, part: Part) -> Symptom | None:
        known = self.search.known.symptoms
        if (part, self.exact) not in known:
            self._run(ChosenPieces(self.compiler, part, cuts=self.cuts))
        return known[part, self.exact]

    def _run(self, backend: ChosenPieces) -> Symptom | None:
        """Compile a part, and tell how that disagrees; what compiled it knows the graphs best."""
        search, key = self.search, (backend.part, self.exact)
        search.tell(Trying(self.stage, *key))
        trial = search.trial(self.stage, backend, exact=self.exact)
        search.known.symptoms[key] = symptom = None if trial is None else symptom_of(trial)
        search.tell()
        if symptom == self.whole:
            self.listed = backend
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
