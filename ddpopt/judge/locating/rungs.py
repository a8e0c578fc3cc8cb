"""The ladder of a search: its stages, how a stage disagrees with eager, and what is known so far.

Plain data that the searching process and its ranks exchange: the ranks send it whenever it changes, and new
ranks continue from it. Invariant: it holds only what was observed, and a rung that could not be judged does
not count as a disagreement.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddpopt.cases.case import Case
from ddpopt.cases.option_cases import differing, in_dtype
from ddpopt.cases.targets import resolve
from ddpopt.judge.engines.modes import LOCAL, mode
from ddpopt.judge.locating.pieces import EVERYTHING
from ddpopt.judge.verdict import Rung, Status, Trial
from ddpopt.ranks.failures import RankFailure


@dataclass(frozen=True)
class Question:
    """The trial under search.

    Attributes:
        target: as on the command line.
        option: name of its option.
        mode: name of its mode.
        backend: the Dynamo backend, as on the command line.
        steps: the number of training steps that show the fault.
        dtype: the dtype to compute in; None for the case's own.
        ddp_kwargs: DDP's arguments, replacing the case's own.
        rank: the rank whose inputs a single process uses.
        structural: whether only the trial's structure is wrong. If not, a lower rung with a wrong structure
            shows a different fault.
        evaluates: whether the fault shows, or may show, only in an evaluation.
    """

    target: str
    option: str
    mode: str
    backend: str
    steps: int = 3
    dtype: str | None = None
    ddp_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    structural: bool = True
    evaluates: bool = False

    def is_shown_by(self, stage: "Stage", symptom: "Symptom | None") -> bool:
        """Whether this disagreement of a stage may be the fault; always true for the trial's own stage."""
        own = (stage.mode, stage.backend) == (self.mode, self.backend)
        return symptom is not None and (own or self.structural or symptom != Symptom("structure"))

    def case(self) -> Case:
        """The case of the trial."""
        found = resolve(self.target)
        if self.ddp_kwargs:
            found = differing(found, self.ddp_kwargs)
        return found if self.dtype is None else in_dtype(found, getattr(torch, self.dtype))

    def case_on(self, ranks: int) -> Case:
        """The case for a number of ranks: a single rank gets the inputs of `rank`."""
        found = self.case()
        return found if ranks > 1 else replace(found, inputs=lambda _, step: found.inputs(self.rank, step))


@dataclass(frozen=True)
class Stage:
    """A rung to try.

    Attributes:
        mode: name of a mode; ``"local"`` for the model alone.
        backend: of Dynamo, as on the command line.
        ranks: the number of ranks.
    """

    mode: str
    backend: str
    ranks: int = 1

    @property
    def name(self) -> str:
        """A description for people."""
        if self.mode == LOCAL.name:
            return f"{self.backend}, no DDP"
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.backend or 'not compiled'}, {self.mode} on {ranks}"


@dataclass(frozen=True)
class Symptom:
    """How a stage disagrees; equal symptoms count as the same disagreement.

    Attributes:
        kind: ``"run"``: it fails; ``"died"``: it crashes its process; ``"structure"`` or ``"numbers"``.
        how: name of the exception, or of the signal that ended the process.
    """

    kind: str
    how: str = ""


def symptom_of(trial: Trial) -> Symptom | None:
    """How a trial disagrees with eager; None if it does not."""
    if trial.status is not Status.WRONG:
        return None
    levels = {finding.level: finding.message for finding in trial.findings[::-1]}
    if "run" in levels:
        return Symptom("run", levels["run"].partition(":")[0])
    return Symptom("structure" if {*levels} == {"L3"} else "numbers")


def rung_of(stage: Stage, trial: Trial) -> Rung:
    """A trial summarized in one line."""
    detail = f"{trial.status}: {trial.reason}" if trial.reason else ""
    if trial.findings:
        detail = f"{trial.findings[0].level}: {trial.findings[0].message}"
    agrees = {Status.OK: True, Status.WRONG: False}.get(trial.status)
    return Rung(stage.name, agrees=agrees, detail=detail)


def ladder(backend: str) -> tuple[str, ...]:
    """The backends from Dynamo's own upwards to one.

    >>> ladder("aot_eager"), ladder("mine")
    (('eager', 'aot_eager'), ('eager', 'aot_eager', 'mine'))
    """
    known = ("eager", "aot_eager", "inductor")
    return known[: known.index(backend) + 1] if backend in known else (*known[:2], backend)


def stages_of(question: Question, ranks: int) -> Iterator[Stage]:
    """The stages to try on a number of ranks, from the lowest upwards."""
    backends = ladder(question.backend) if question.backend else ()
    modes = [LOCAL.name] if ranks == 1 and question.backend else []
    if question.backend and mode(question.mode).observable and question.mode != "whole":
        modes.append("whole")
    for name in [*modes, question.mode]:
        for backend in backends or ("",):
            yield Stage(name, backend, ranks)


@dataclass(frozen=True)
class Try:
    """One attempt of the search.

    Attributes:
        stage: the stage.
        part: the part that is compiled.
        exact: whether it is compared bit for bit; None while the ladder is climbed.
    """

    stage: Stage
    part: range = EVERYTHING
    exact: bool | None = None


@dataclass
class Known:
    """The state of a search.

    Attributes:
        rungs: the rungs, in the order in which they were tried.
        stage: the lowest stage that disagrees; None while the ladder is climbed.
        symptom: how it disagrees.
        trying: the current try.
        symptoms: the symptom of each try that was made after the stage was found; None if it agreed.
        segments: the segments that must be compiled to show the fault, as text; empty if it appears with
            nothing compiled.
        about_segments: a remark on the segments for the reader.
        notes: remarks on the search for the reader.
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
        """Adopt the state that rank 0 sent."""
        vars(self).update(vars(told))

    def survive(self, first: RankFailure) -> bool:
        """Record that ranks failed.

        Args:
            first: the first failure.

        Returns:
            Whether a try caused it, so that new ranks can continue from here.
        """
        tried = self.trying
        end = first.signal or f"exit code {first.exit_code}"
        how = f"rank {first.rank} {first.kind}{f' of {end}' if first.kind == 'died' else ''}"
        if tried is None or first.kind == "stalled":
            during = f" while {tried.stage.name} was being tried" if tried else ""
            why = f": {first.error}" if first.kind == "raised" else ""
            self.notes.append(f"the search ended early{during}: {how}{why}")
            return False
        symptom = Symptom("died", end)
        if first.kind == "raised":
            symptom = Symptom("run", first.error.partition(":")[0].rpartition(".")[2])
        if tried.exact is None:
            self.rungs.append(Rung(tried.stage.name, agrees=False, detail=how))
            self.stage = tried.stage
            self.symptom = symptom
        self.symptoms[replace(tried, exact=bool(tried.exact))] = symptom
        return True
