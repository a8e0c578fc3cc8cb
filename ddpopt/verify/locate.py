"""When a trial is wrong: in which layer, in which segments, and a script that shows it.

The model alone is compiled first, then DDP of one rank is put around it, then DDP of several; each with the
backends from Dynamo's own upwards. The lowest rung that disagrees with eager names the layer. All of it runs
in ranks of its own, so a crash there is a finding, and this process stays as it was.

Invariant: what is known when the time is over is returned, with a note that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpopt.errors import InfrastructureError
from ddpopt.testing.case import resolve
from ddpopt.verify.modes import LOCAL, mode
from ddpopt.verify.rank_failures import RanksFailed
from ddpopt.verify.ranks import launch
from ddpopt.verify.reproduction import Written, write
from ddpopt.verify.scripting import Author
from ddpopt.verify.search import (
    Blamed,
    Question,
    Stage,
    Symptom,
    Tried,
    Trying,
    search,
    stages_of,
)
from ddpopt.verify.trials import STEPS
from ddpopt.verify.verdict import Location, Rung, Trial

LIMIT_S = 120.0
FOR_NARROWING = 0.55
"""Share of the time after which no new choice of segments is tried: the rest is for scripts."""
FOR_RANKS = 0.8
"""Share of the time after which ranks are ended."""
LAYERS = {
    "eager": "Dynamo (torch.compile, backend eager)",
    "aot_eager": "AOTAutograd (backend aot_eager)",
    "inductor": "Inductor (backend inductor)",
}


@dataclass
class Known:
    """What is known so far.

    Attributes:
        rungs: in the order in which they were tried.
        wrong: the lowest stage that disagrees.
        symptom: how it does.
        trying: the stage that is being tried.
        blamed: what has to be compiled for it.
        notes: what a reader should know.
    """

    rungs: list[Rung] = field(default_factory=list)
    wrong: Stage | None = None
    symptom: Symptom | None = None
    trying: Stage | None = None
    blamed: Blamed | None = None
    notes: list[str] = field(default_factory=list)

    def start(self) -> None:
        """New ranks start: nothing is being tried."""
        self.trying = None

    def hear(self, event: object) -> None:
        """Take in what rank 0 tells."""
        if isinstance(event, Trying):
            self.trying = event.stage
        elif isinstance(event, Tried):
            self.trying = None
            self.rungs.append(event.rung)
            if event.symptom is not None:
                self.wrong, self.symptom = event.stage, event.symptom
        elif isinstance(event, Blamed):
            self.blamed = event
            self.notes += [event.note] if event.note else []


def locate(  # noqa: PLR0913  # what a trial does not say of the verification that it is from
    target: str,
    trial: Trial,
    script: Path,
    *,
    nproc: int = 2,
    steps: int = STEPS,
    strategy: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    limit_s: float = LIMIT_S,
) -> Location:
    """Look where a wrong trial goes wrong.

    Args:
        target: what was verified.
        trial: a trial of it that is wrong.
        script: where to write the script that shows it; what it needs goes beside it, with ``.pt``.
        nproc: on how many ranks the trial ran.
        steps: how many steps it took.
        strategy: ddpopt's, in place of the mode's own.
        dtype: in which it computed; None for the case's own.
        device: as for `ddpopt.verify.runner.verify`.
        ddp_kwargs: DDP's arguments, in place of the target's own.
        limit_s: seconds after which what is known is returned.

    Returns:
        The rungs that were tried, the layer, the segments and the script.

    Raises:
        UsageError: the target or the backend cannot be found.
    """
    began = time.monotonic()

    def left(share: float = 1.0) -> float:
        return began + share * limit_s - time.monotonic()

    resolve(target)  # it may register the backend
    question = Question(
        target,
        trial.option,
        trial.mode,
        trial.backend,
        strategy,
        _steps_of(trial, steps),
        dtype,
        ddp_kwargs or {},
        rank=min((f.rank for f in trial.findings if f.rank is not None), default=0),
    )
    known = Known()
    for ranks in dict.fromkeys((1, nproc)):
        if known.wrong is None and left(FOR_RANKS) > 0:
            _in_ranks(known, question, ranks, device, (left(FOR_NARROWING), left(FOR_RANKS)))
    return _location(known, _written(known, Author(question, script), left), trial)


def _steps_of(trial: Trial, steps: int) -> int:
    """As few steps as show it: each starts from the state that eager's started from."""
    seen = [finding.step for finding in trial.findings]
    known = [step for step in seen if step is not None]
    return min(steps, min(known) + 1) if known and len(known) == len(seen) else steps


def _in_ranks(
    known: Known, question: Question, ranks: int, device: str | None, limits: tuple[float, float]
) -> None:
    """Run the search on some ranks; ranks that fail where a stage was tried are what that stage does."""
    known.start()
    narrowing_s, all_s = limits
    asked = (question, list(stages_of(question, ranks)), narrowing_s)
    try:
        launch(
            search, *asked, nproc=ranks, limit_s=max(all_s, 1.0), on_event=known.hear, device=device or "cpu"
        )
    except RanksFailed as failed:
        first = failed.culprits[0]
        how = f"rank {first.rank} {first.kind}{f' of {first.signal}' if first.signal else ''}"
        if first.kind == "stalled":
            known.notes.append("the time was over before the search ended")
        elif known.trying is None:
            known.notes.append(f"the search on {ranks} rank(s) ended early: {how}: {_last_line(first.stack)}")
        else:
            known.rungs.append(Rung(known.trying.name, agrees=False, detail=how))
            known.wrong, known.symptom = known.trying, Symptom("run", how)
            known.hear(Blamed((), note="the rank died, so segments were not searched", dies=True))
    except InfrastructureError as error:
        known.notes.append(str(error))


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or "without a word"


def _written(known: Known, author: Author, time_left: Callable[[], float]) -> Written:
    if known.wrong is None:
        return Written()
    return write(author.script, author.drafts(known.wrong, known.blamed or Blamed(())), time_left)


def _location(known: Known, written: Written, trial: Trial) -> Location:
    notes = [*known.notes, *([written.note] if written.note else [])]
    if known.wrong is None:
        gone = "none was found: the difference did not appear again"
        layer = gone if not known.notes else "none was found before the search ended"
        notes.append("no script was written, for there is nothing that it could show")
    else:
        layer = layer_of(known.wrong, known.symptom, trial.mode)
    return Location(
        rungs=tuple(known.rungs),
        layer=layer,
        segments=known.blamed.segments if known.blamed else (),
        script=written.script,
        reproduces=written.reproduces,
        note="; ".join(notes),
    )


def layer_of(stage: Stage, symptom: Symptom | None, mode_on_trial: str) -> str:
    """Name the layer that a stage adds to those below it.

    Args:
        stage: the lowest that disagrees.
        symptom: how it does.
        mode_on_trial: name of the mode that was found wrong.

    Returns:
        The layer, in words.
    """
    compiled = LAYERS.get(stage.backend, f"the backend {stage.backend}")
    only = " (in structure alone)" if symptom == Symptom("structure") else ""
    if stage.mode == LOCAL.name:
        return compiled + only
    ranks = "one rank suffices" if stage.ranks == 1 else f"with {stage.ranks} ranks"
    if stage.mode == "whole" and mode_on_trial != "whole":
        return (
            f"torch.compile of a DDP module, before {mode_on_trial} comes into it: {compiled}, {ranks}{only}"
        )
    together = "" if stage.backend in ("", "eager") else f" together with {compiled}"
    about = mode(stage.mode).about
    return f"the data-parallel mode {stage.mode} ({about}) under DDP{together}, {ranks}{only}"
