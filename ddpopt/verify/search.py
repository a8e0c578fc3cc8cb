"""What ranks do to find where a trial goes wrong: climb the ladder, then narrow the difference down.

Each rung is judged as a trial is, against eager DDP of as many ranks. What is found is told as it is found,
so that a search which runs out of time has said what it knows. Invariant: a rung that could not be judged is
no disagreement.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddpopt.backend import find_compiler
from ddpopt.testing.case import Case, resolve
from ddpopt.verify.judge import judge
from ddpopt.verify.modes import LOCAL, Mode, mode
from ddpopt.verify.narrow import narrowed
from ddpopt.verify.option_cases import differing, in_dtype
from ddpopt.verify.options import Option, option
from ddpopt.verify.pieces import ChosenPieces, Piece
from ddpopt.verify.ranks import Ranks
from ddpopt.verify.reference import Bench, Reference, Subject
from ddpopt.verify.segment_code import Code, NotWritable, Recorder
from ddpopt.verify.verdict import Finding, Rung, Status, Trial

CUT_BY_MODE = ("torch", "ddpopt-split")
"""Modes that cut the graph themselves: their own segments are the pieces."""
WHOLE_BY_MODE = ("ddpopt-inline", "python_reducer", "python_reducer_concat", "python_reducer_coalesced")
"""Modes whose graphs hold more than the model's forward, so that they are not cut here."""
NUMBERS = ("L0", "L1", "L2")


@dataclass(frozen=True)
class Question:
    """The trial that is looked into.

    Attributes:
        target: as on the command line.
        option: name of its option.
        mode: name of its mode.
        backend: of Dynamo.
        strategy: ddpopt's, in place of the mode's own.
        steps: how many steps of training show it.
        dtype: to compute in; None for the case's own.
        ddp_kwargs: DDP's arguments, in place of the case's own.
        rank: whose inputs a single process is to have.
    """

    target: str
    option: str
    mode: str
    backend: str
    strategy: str | None = None
    steps: int = 3
    dtype: str | None = None
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0

    def case(self) -> Case:
        """The case that was on trial."""
        found = resolve(self.target)
        if self.ddp_kwargs:
            found = differing(found, self.ddp_kwargs)
        return found if self.dtype is None else in_dtype(found, getattr(torch, self.dtype))

    def case_of_rank(self) -> Case:
        """The case with the inputs of a single rank, on whichever rank it runs."""
        found = self.case()
        return replace(found, inputs=lambda _, step: found.inputs(self.rank, step))


@dataclass(frozen=True)
class Stage:
    """A rung to try.

    Attributes:
        mode: name of a mode; ``"local"`` for the model alone.
        backend: of Dynamo.
        ranks: on how many.
    """

    mode: str
    backend: str
    ranks: int = 1

    @property
    def name(self) -> str:
        """For a person."""
        if self.mode == LOCAL.name:
            return f"{self.backend}, no DDP"
        backend, ranks = (
            self.backend or "not compiled",
            "1 rank" if self.ranks == 1 else f"{self.ranks} ranks",
        )
        return f"{backend}, {self.mode} on {ranks}"


@dataclass(frozen=True)
class Symptom:
    """How a stage disagrees, as far as two disagreements must be alike to count as the same.

    Attributes:
        kind: ``"run"`` it fails, ``"structure"`` or ``"numbers"``.
        error: name of the exception, where it fails.
    """

    kind: str
    error: str = ""


@dataclass(frozen=True)
class Trying:
    """An event: a stage is about to be tried."""

    stage: Stage


@dataclass(frozen=True)
class Tried:
    """An event: a stage was tried.

    Attributes:
        stage: which.
        rung: how it went.
        symptom: how it disagreed, if it did.
    """

    stage: Stage
    rung: Rung
    symptom: Symptom | None


@dataclass(frozen=True)
class Blamed:
    """An event: what has to be compiled for the difference to appear.

    Attributes:
        segments: in words; empty where the difference appears though nothing is compiled.
        code: the guilty part as source code; None if it has none.
        exact: whether only a comparison bit by bit shows it.
        note: what a reader should know.
        dies: whether the difference is that a process dies.
    """

    segments: tuple[str, ...]
    code: Code | None = None
    exact: bool = False
    note: str = ""
    dies: bool = False


def symptom_of(trial: Trial) -> Symptom | None:
    """How a trial disagrees with eager; None if it does not."""
    if trial.status is not Status.WRONG:
        return None
    levels = {finding.level for finding in trial.findings}
    if "run" in levels:
        return Symptom("run", _failed(trial).message.partition(":")[0])
    return Symptom("numbers") if levels & {*NUMBERS} else Symptom("structure")


def _failed(trial: Trial) -> Finding:
    return next(finding for finding in trial.findings if finding.level == "run")


def rung_of(stage: Stage, trial: Trial) -> Rung:
    """A trial in one line."""
    if trial.status is Status.NOT_POSSIBLE:
        return Rung(stage.name, agrees=True, detail=f"not possible: {trial.reason}")
    if not trial.findings:
        return Rung(stage.name, agrees=True)
    worst = max(trial.findings, key=lambda finding: (finding.level == "run", _excess(finding)))
    return Rung(stage.name, agrees=False, detail=f"{worst.level}: {worst.message}")


def _excess(finding: Finding) -> float:
    if finding.error is None or finding.bound is None:
        return 0.0
    return finding.error / finding.bound if finding.bound else float("inf")


class Search:
    """The ranks that look into one trial, with eager's runs made once.

    Args:
        ranks: on which this runs.
        question: the trial.
        time_left: how much time is left, in seconds.
    """

    def __init__(self, ranks: Ranks, question: Question, time_left: Callable[[], float]) -> None:
        self.ranks = ranks
        self.question = question
        self.time_left = time_left
        case = question.case() if ranks.size > 1 else question.case_of_rank()
        self.case = case
        asked = option(question.option)
        self._with_ddp = self._bench(asked)
        self.reference = Reference.make(self._with_ddp)
        self._alone: Reference | None = None
        if self.reference is not None and ranks.size == 1 and asked.needs != "nothing":
            self._alone = Reference.make(self._bench(replace(asked, needs="nothing")))
        elif ranks.size == 1:
            self._alone = self.reference

    def _bench(self, asked: Option) -> Bench:
        return Bench(Subject(self.case, asked, self.question.steps, self.ranks.device), self.ranks)

    def climb(self, stages: Sequence[Stage]) -> Stage | None:
        """Try stages until one disagrees.

        Args:
            stages: from the lowest upwards.

        Returns:
            The lowest that disagrees; None if none does.
        """
        for stage in stages:
            self.ranks.emit(Trying(stage))
            trial = self.trial(stage, stage.backend)
            if trial is None:
                continue
            symptom = symptom_of(trial)
            self.ranks.emit(Tried(stage, rung_of(stage, trial), symptom))
            if symptom is not None:
                return stage
        return None

    def trial(self, stage: Stage, backend: Any, *, exact: bool | None = None) -> Trial | None:
        """Judge one stage; None where eager itself cannot run it."""
        reference = self._alone if stage.mode == LOCAL.name else self.reference
        if reference is None:
            return None
        strategy = self.question.strategy if stage.mode == self.question.mode else None
        return judge(reference, _mode(stage), backend, strategy=strategy, exact=exact)

    def narrow(self, stage: Stage) -> Blamed:
        """Find what has to be compiled for a stage to disagree.

        Args:
            stage: one that disagrees.

        Returns:
            The smallest set of pieces, in words, with its code if a single rank suffices and it has any.
        """
        if not stage.backend:
            return Blamed((), note="nothing is compiled in this mode")
        compiler = find_compiler(stage.backend)
        cuts = stage.mode not in CUT_BY_MODE + WHOLE_BY_MODE
        first, whole, exact = self._whole(stage, compiler, cuts)
        if whole is None:
            return Blamed((), note="the difference did not appear again when pieces were about to be chosen")

        def shows(chosen: tuple[Piece, ...]) -> bool:
            trial = self.trial(stage, ChosenPieces(compiler, chosen, cuts=cuts), exact=exact)
            return trial is not None and symptom_of(trial) == whole

        if not first.graphs or shows(()):
            return Blamed((), exact=exact, note="the difference appears though no piece is compiled")
        # asked of all ranks, so that they end together
        found = narrowed(first.all, shows, goes_on=lambda: min(self.ranks.gather(self.time_left())) > 0)
        code, note = self._code(stage, found.items, cuts) if stage.ranks == 1 else (None, "")
        if not found.ended:
            note = f"the search ended early, after {found.tries} tries: fewer segments may do. {note}".strip()
        return Blamed(first.described(found.items), code, exact, note)

    def _whole(self, stage: Stage, compiler: Any, cuts: bool) -> tuple[ChosenPieces, Symptom | None, bool]:
        """Everything compiled: first as far as rounding goes, then, if that shows nothing, bit by bit."""
        for exact in (False, True):
            everything = ChosenPieces(compiler, cuts=cuts)
            trial = self.trial(stage, everything, exact=exact)
            symptom = None if trial is None else symptom_of(trial)
            if symptom is not None:
                return everything, symptom, exact
        return everything, None, True

    def _code(self, stage: Stage, chosen: Sequence[Piece], cuts: bool) -> tuple[Code | None, str]:
        recorder = Recorder(chosen, cuts=cuts)
        try:
            self.trial(stage, recorder, exact=False)
            return recorder.code(), ""
        except NotWritable as error:
            return None, f"the segment has no code of its own: {error}"


def _mode(stage: Stage) -> Mode:
    return LOCAL if stage.mode == LOCAL.name else mode(stage.mode)


def search(ranks: Ranks, question: Question, stages: Sequence[Stage], seconds: float) -> None:
    """Climb, and narrow down what is found; all is told by events. A collective of all ranks.

    Args:
        ranks: on which this runs.
        question: the trial.
        stages: from the lowest upwards.
        seconds: how long new tries may begin.
    """
    gc.collect()
    gc.freeze()  # each run collects its garbage, and what is imported by now is none
    until = time.monotonic() + seconds
    running = Search(ranks, question, lambda: until - time.monotonic())
    stage = running.climb(stages)
    if stage is not None:
        ranks.emit(running.narrow(stage))


def ladder(backend: str) -> tuple[str, ...]:
    """The backends from Dynamo's own upwards to one.

    >>> ladder("aot_eager"), ladder("mine")
    (('eager', 'aot_eager'), ('eager', 'aot_eager', 'mine'))
    """
    known = ("eager", "aot_eager", "inductor")
    return known[: known.index(backend) + 1] if backend in known else (*known[:2], backend)


def stages_of(question: Question, ranks: int) -> Iterator[Stage]:
    """What to try on a number of ranks, from the lowest upwards."""
    backends = ladder(question.backend) if question.backend else ()
    modes = [LOCAL.name] if ranks == 1 else []
    if question.backend and mode(question.mode).observable and question.mode != "whole":
        modes.append("whole")
    for name in [*modes, question.mode]:
        for backend in backends or ("",):
            yield Stage(name, backend, ranks)
