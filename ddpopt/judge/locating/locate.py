"""Locate a fault: in which layer and which segments a trial goes wrong, with a script that shows it.

First the model alone is compiled, then the model under DDP on one rank, then on several; each with the
backends from Dynamo's own upwards. The lowest rung that disagrees with eager names the layer. The search runs
in separate ranks, so a crash there is a finding and does not affect this process; under torchrun, rank 0
starts them on its machine and its peers wait.

Invariant: when the time is over, the result so far is returned, with a note that says so.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddpopt.cases.targets import resolve
from ddpopt.dynamo.backends import backend_of
from ddpopt.errors import InfrastructureError
from ddpopt.judge.engines.modes import LOCAL, mode
from ddpopt.judge.locating.rungs import Known, Question, Stage, Symptom, stages_of
from ddpopt.judge.locating.scripting import script_of, shows
from ddpopt.judge.locating.search import search
from ddpopt.judge.trials.on_rank import STEPS
from ddpopt.judge.trials.relaunching import run_until_done
from ddpopt.judge.verdict import Location, Trial
from ddpopt.ranks.group import COLLECTIVE_LIMIT_S, joined, under_torchrun

LIMIT_S = 120.0
FOR_NARROWING = 0.55
"""Share of the time after which no new segments are tried; the rest is for the script."""
FOR_RANKS = 0.7
"""Share of the time after which ranks are ended."""
LAYERS = {
    "eager": "Dynamo (torch.compile, backend eager)",
    "aot_eager": "AOTAutograd (backend aot_eager)",
    "inductor": "Inductor (backend inductor)",
}


def locate(  # noqa: PLR0913  # the settings that a trial does not record
    target: str,
    trial: Trial,
    script: Path,
    *,
    nproc: int = 2,
    steps: int = STEPS,
    dtype: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    limit_s: float = LIMIT_S,
) -> Location:
    """Find where a wrong trial goes wrong. Under torchrun, every rank must call this.

    Args:
        target: what was verified.
        trial: a wrong trial of the target.
        script: where to write the script that shows the fault.
        nproc: the number of ranks of the trial.
        steps: the number of steps of the trial.
        dtype: the dtype it computed in; None for the case's own.
        device: as for `ddpopt.judge.trials.runner.verify`.
        backend: as on the command line; None for the trial's backend.
        ddp_kwargs: DDP's arguments, replacing the target's own.
        limit_s: seconds after which the result so far is returned.

    Returns:
        The rungs that were tried, the layer, the segments and the script.

    Raises:
        UsageError: the target or the backend cannot be found.
    """
    began = time.monotonic()

    def left(share: float = 1.0) -> float:
        return began + share * limit_s - time.monotonic()

    resolve(target)  # importing the target may register the backend
    compiler = (backend or trial.backend) if trial.backend else ""
    if compiler:
        backend_of(compiler)
    question = replace(_asked_of(trial, target, compiler, steps), dtype=dtype, ddp_kwargs=ddp_kwargs or {})
    if not under_torchrun():
        return _located(question, script, nproc, device, left)
    with joined(timeout_s=COLLECTIVE_LIMIT_S + limit_s) as ranks:
        found = _located(question, script, nproc, device, left) if ranks.rank == 0 else None
        shared: Location = ranks.gather(found)[0]
        return shared


def _located(
    question: Question, script: Path, nproc: int, device: str | None, left: Callable[..., float]
) -> Location:
    known = Known()
    # the default device of a trial on `nproc` ranks, also for a search on a single rank
    device = device or ("cuda" if torch.cuda.device_count() >= nproc else "cpu")
    for ranks in dict.fromkeys((1, nproc)):
        if known.stage is None and left(FOR_RANKS) > 0:
            _in_ranks(known, question, ranks, device, left)
    if known.stage is None or known.symptom is None:
        layer = "none was found: the difference did not appear again"
        if known.notes:
            layer = "none was found before the search ended"
        nothing = "no script was written, because there is nothing for it to show"
        return Location(tuple(known.rungs), layer, note="; ".join([*known.notes, nothing]))
    layer = layer_of(known.stage, known.symptom)
    notes = [*known.notes, known.about_segments]
    location = Location(tuple(known.rungs), layer, known.segments)
    try:
        text = script_of(question, known.stage, known.symptom, known, layer, script, device)
        script.write_text(text, encoding="utf-8")
        location = replace(location, script=script.name)
        if left() > 0:
            location = replace(location, reproduces=shows(script, 1, left()))
        else:
            notes.append("no time was left to run the script")
    except OSError as error:
        notes.append(f"no script could be written or run: {script}: {error.strerror or error}")
    return replace(location, note="; ".join(filter(None, notes)))


def _asked_of(trial: Trial, target: str, compiler: str, steps: int) -> Question:
    """The question that follows from a trial and its findings."""
    wrong_steps = [finding.step for finding in trial.findings if finding.step is not None]
    # if a finding has no step, run all steps and the evaluation
    all_have_one = bool(wrong_steps) and len(wrong_steps) == len(trial.findings)
    first = min(wrong_steps) if all_have_one else steps
    return Question(
        target,
        trial.option,
        trial.mode,
        compiler,
        steps=min(steps, first + 1),  # the fewest that show it: each starts from eager's state
        rank=min((f.rank for f in trial.findings if f.rank is not None), default=0),
        structural=all(finding.level == "L3" for finding in trial.findings),
        evaluates=first >= steps,
    )


def _in_ranks(
    known: Known, question: Question, ranks: int, device: str, left: Callable[[float], float]
) -> None:
    """Run the search in separate ranks, and in new ones after a try that crashes them."""
    stages = list(stages_of(question, ranks))

    def next_search() -> tuple[Any, ...]:
        known.trying = None
        return search, question, stages, left(FOR_NARROWING), known

    try:
        is_done = run_until_done(
            next_search,
            nproc=ranks,
            left_s=lambda: left(FOR_RANKS),
            survives=lambda failed: known.survive(failed.culprits[0]),
            on_event=known.hear,
            device=device,
        )
    except (InfrastructureError, OSError) as error:
        known.notes.append(f"the search on {ranks} rank(s) ended early: {error}")
        return
    if not is_done:
        known.notes.append("the search ended early, because its ranks kept dying")


def layer_of(stage: Stage, symptom: Symptom) -> str:
    """Name the layer that a stage adds to those below it.

    Args:
        stage: the lowest stage that disagrees.
        symptom: how it disagrees.

    Returns:
        The layer, as text.
    """
    compiled = LAYERS.get(stage.backend, f"the backend {stage.backend}")
    only = " (in structure only)" if symptom == Symptom("structure") else ""
    if stage.mode == LOCAL.name:
        return compiled + only
    together = "" if stage.backend in ("", "eager") else f" together with {compiled}"
    ranks = "one rank suffices" if stage.ranks == 1 else f"with {stage.ranks} ranks"
    return f"the data-parallel mode {stage.mode} ({mode(stage.mode).about}){together}, {ranks}{only}"
