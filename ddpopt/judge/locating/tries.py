"""What ranks do in a search: try a stage, with some pieces compiled or all, and tell how it disagrees.

The process that searches holds all that is known; its ranks hold eager's runs, which are made once.
Invariant: an answer depends on what is asked alone, not on what was tried before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ddpopt.dynamo.backend import find_compiler
from ddpopt.judge.backends import backend_of
from ddpopt.judge.judge import judge
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.locating.pieces import ChosenPieces, Piece, Seen
from ddpopt.judge.locating.rungs import Question, Stage, Symptom, rung_of, symptom_of
from ddpopt.judge.locating.segment_code import Code, NotWritable, Recorder
from ddpopt.judge.modes import LOCAL, mode
from ddpopt.judge.options import option
from ddpopt.judge.trainer import Option
from ddpopt.judge.trials import Settings, quickly
from ddpopt.judge.verdict import Rung, Trial
from ddpopt.ranks.group import COLLECTIVE_LIMIT_S, Ranks
from ddpopt.ranks.process import RankProcess

Choice = tuple[Piece, ...] | None
"""What is compiled of a model; None for all of it."""


class Tries:
    """Ranks on which stages of one trial are tried.

    Args:
        ranks: these.
        question: the trial.
    """

    def __init__(self, ranks: Ranks, question: Question) -> None:
        self.ranks = ranks
        self.question = question
        self._case = question.case() if ranks.size > 1 else question.case_of_rank()
        self._option = option(question.option)
        self._benches = ExitStack()

    def close(self) -> None:
        """Give the process groups back."""
        self._benches.close()

    @cached_property
    def reference(self) -> Reference | None:
        """Eager DDP's runs; None if it fails here."""
        return self._eager(self._option)

    @cached_property
    def alone(self) -> Reference | None:
        """The same for the model alone, of which nothing of DDP's can be asked."""
        if self._option.needs == "nothing":
            return self.reference
        return self._eager(replace(self._option, needs="nothing"))

    def _eager(self, asked: Option) -> Reference | None:
        question = self.question
        subject = Subject(self._case, asked, question.steps, self.ranks.device, question.evaluates)
        bench = Bench(subject, self.ranks, Settings().collective_limit_s)
        return Reference.make(self._benches.enter_context(closing(bench)))

    def trial(self, stage: Stage, backend: Any, exact: bool | None) -> Trial | None:
        """Judge one stage; None where eager itself cannot run it."""
        is_alone = stage.mode == LOCAL.name
        reference = self.alone if is_alone else self.reference
        if reference is None:
            return None
        return judge(reference, LOCAL if is_alone else mode(stage.mode), backend, exact=exact)


def host(process: RankProcess, question: Question) -> None:
    """Be a rank of a pool whose tasks are the functions below, all in one process group."""
    with quickly(), process.joined(COLLECTIVE_LIMIT_S) as ranks, closing(Tries(ranks, question)) as tries:
        process.serve(lambda _: nullcontext(tries))


def prepare(tries: Tries) -> None:
    """Run eager, so that a failure of its own is not taken for that of a stage."""
    _ = (tries.reference, tries.ranks.size > 1 or tries.alone)


@dataclass(frozen=True)
class Reply:
    """What came of a try.

    Attributes:
        symptom: how the stage disagrees with eager; None if it does not, or could not be judged.
        rung: the same for a reader; None where eager itself cannot run the stage.
        graphs: what was compiled, where pieces were chosen.
    """

    symptom: Symptom | None
    rung: Rung | None
    graphs: tuple[Seen, ...] = ()


def try_stage(tries: Tries, stage: Stage) -> Reply:
    """Judge a stage as it is."""
    return _reply(stage, tries.trial(stage, backend_of(stage.backend), None))


def try_pieces(tries: Tries, stage: Stage, chosen: Choice, exact: bool) -> Reply:
    """Judge a stage with nothing compiled but some pieces, bit by bit or as far as rounding goes."""
    backend = ChosenPieces(find_compiler(backend_of(stage.backend)), chosen, cuts=stage.cuts)
    return replace(_reply(stage, tries.trial(stage, backend, exact)), graphs=tuple(backend.graphs))


def _reply(stage: Stage, trial: Trial | None) -> Reply:
    return Reply(None, None) if trial is None else Reply(symptom_of(trial), rung_of(stage, trial))


def write_pieces(tries: Tries, stage: Stage, chosen: Sequence[Piece]) -> Code | str:
    """Write pieces down as source code, or say why they have none."""
    recorder = Recorder(chosen, cuts=stage.cuts)
    try:
        tries.trial(stage, recorder, exact=False)
        return recorder.code()
    except NotWritable as error:
        return f"the segment has no source code: {error}"
