"""Find on ranks where a trial goes wrong: climb the ladder, then narrow the difference down.

Each rung is judged like a trial, against eager DDP on the same number of ranks. Results are reported at once,
so that a search that runs out of time, or whose ranks die, has reported what it knows. A try that crashes its
ranks is a result too: new ranks receive it and continue from there.

Invariant: equal knowledge leads to equal tries, on every rank and in every process that continues the search.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from ddpopt.dynamo.backend import find_compiler
from ddpopt.dynamo.backends import backend_of
from ddpopt.judge.engines.modes import LOCAL, mode
from ddpopt.judge.locating.pieces import NOTHING, ChosenPieces
from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom, Try, rung_of, symptom_of
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.trials.on_rank import Settings, gc_frozen
from ddpopt.judge.trials.resuming import resume
from ddpopt.judge.verdict import Trial
from ddpopt.ranks.group import Ranks

EARLY = "the search ended early: fewer segments may suffice"
CUT_BY_MODE = ("torch", "ddpopt-split")
"""Modes that cut the graph themselves: their own segments are the pieces."""


def search(ranks: Ranks, question: Question, stages: Sequence[Stage], seconds: float, known: Known) -> None:
    """Climb the ladder and narrow the difference down; emits results as events. A collective of all ranks.

    Args:
        ranks: the ranks that search.
        question: the trial.
        stages: the stages that remain, from the lowest upwards.
        seconds: how long new tries may begin.
        known: the results of earlier ranks.
    """
    until = time.monotonic() + seconds
    asked = option(question.option)
    case = question.case_on(ranks.size)
    subject = Subject(case, asked, question.steps, ranks.device, evaluates=question.evaluates)
    with gc_frozen(), closing(Bench(subject, ranks, Settings().collective_limit_s, resume)) as bench:
        reference = Reference.make(bench)
        if reference is None:
            known.notes.append(f"eager DDP itself fails on {ranks.size} rank(s)")
            ranks.emit(known)
            return
        running = Search(question, reference, until, known)
        if known.stage is None:
            running.climb(stages)
        if known.stage is not None:
            running.narrow(known.stage)


class Search:
    """The search into one trial, on ranks that hold eager's runs.

    Args:
        question: the trial.
        reference: eager DDP's run of it.
        until: when the last try may begin, by `time.monotonic`.
        known: the results so far; updated in place.
    """

    def __init__(self, question: Question, reference: Reference, until: float, known: Known) -> None:
        self.question = question
        self.reference = reference
        self.ranks = reference.bench.ranks
        self.until = until
        self.known = known
        self.listed: ChosenPieces | None = None

    def climb(self, stages: Sequence[Stage]) -> None:
        """Try stages, from the lowest upwards, until one disagrees."""
        for stage in stages:
            trial = self._trial(Try(stage), backend_of(stage.backend) if stage.backend else None)
            symptom = symptom_of(trial)
            self.known.rungs.append(rung_of(stage, trial))
            if self.question.is_shown_by(stage, symptom):
                self.known.stage = stage
                self.known.symptom = symptom
            self._notify()
            if self.known.stage is not None:
                return

    def narrow(self, stage: Stage) -> None:
        """Find what must be compiled for a stage to disagree, and report it."""
        if not stage.backend:
            self._blame("nothing is compiled in this mode")
            return
        whole = Try(stage, exact=False)  # first beyond rounding; if that shows nothing, bit for bit
        if self._symptom(whole) is None:
            whole = replace(whole, exact=True)
        symptom = self._symptom(whole)
        nothing = replace(whole, part=NOTHING)
        if symptom is None:
            self._blame("the difference did not appear again before pieces were chosen")
        elif (self.known.symptoms.get(nothing) or self._run(nothing)) == symptom or self.listed is None:
            self._blame("the difference appears even though no piece is compiled")
        else:
            self._blame(EARLY, self.listed.described(whole.part))
            self._bisect(whole, self.listed)

    def _bisect(self, whole: Try, listed: ChosenPieces) -> None:
        """Find the first place where a part that shows it may end, then the last where it may begin."""

        def shows(start: int, stop: int) -> bool:
            return self._shows(whole, replace(whole, part=range(start, stop)))

        ends = [*range(1, listed.count), sys.maxsize]
        stop = ends[bisect_left(ends[:-1], True, key=lambda stop: shows(0, stop))]
        starts = range(1, min(stop, listed.count))
        start = bisect_left(starts, True, key=lambda start: not shows(start, stop))
        if self._has_time():
            self._blame("", self.listed.described(range(start, stop)) if self.listed else ())

    def _shows(self, whole: Try, one: Try) -> bool:
        """Whether a part shows the fault; false for untested parts once the time is over."""
        if one not in self.known.symptoms and not self._has_time():
            return False
        shows = self._symptom(one) == self.known.symptoms[whole]
        if shows and self.listed is not None:
            self._blame(EARLY, self.listed.described(one.part))
        return shows

    def _has_time(self) -> bool:
        """Whether a new try may begin; all ranks decide together, so that they stop together."""
        return all(self.ranks.gather(time.monotonic() < self.until))

    def _symptom(self, one: Try) -> Symptom | None:
        """How a try disagrees."""
        symptoms = self.known.symptoms
        if one not in symptoms:
            symptoms[one] = self._run(one)
            self._notify()
        return symptoms[one]

    def _run(self, one: Try) -> Symptom | None:
        compiler = find_compiler(backend_of(one.stage.backend))
        backend = ChosenPieces(compiler, one.part, cuts=one.stage.mode not in CUT_BY_MODE)
        symptom = symptom_of(self._trial(one, backend))
        if self.listed is None or symptom == self.known.symptom:
            self.listed = backend  # the backend of the guilty part has the most accurate graphs
        return symptom

    def _trial(self, one: Try, backend: Any) -> Trial:
        self._notify(one)
        own = LOCAL if one.stage.mode == LOCAL.name else mode(one.stage.mode)
        return judge(self.reference, own, backend, exact=one.exact)

    def _blame(self, about: str, segments: tuple[str, ...] = ()) -> None:
        self.known.about_segments = about
        self.known.segments = segments
        self._notify()

    def _notify(self, trying: Try | None = None) -> None:
        """Report the results so far, and the next try."""
        self.known.trying = trying
        self.ranks.emit(self.known)
