"""Judge one mode on simulated ranks, and report a trial.

Invariant: what the simulation cannot know is named in the trial, and never called right.
"""

import time
import warnings
from dataclasses import replace
from typing import Any

import torch

from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.modes import Zero
from ddpopt.judge.rules.bench import Subject
from ddpopt.judge.rules.outcome import has_option
from ddpopt.judge.simulation.lockstep import Lockstep
from ddpopt.judge.simulation.world import simulated
from ddpopt.judge.training.trainer import Option
from ddpopt.judge.verdict import Status, Trial

NOT_SIMULATED = "is not simulated: its result depends on what other ranks send; verify it on real ranks"


def simulate(subject: Subject, mode: Engine, backend: Any, size: int) -> Trial:
    """Judge a mode on simulated ranks. Afterwards this process has no process group.

    Args:
        subject: the case, under an option.
        mode: the mode.
        backend: the Dynamo backend, for modes that compile.
        size: the number of ranks.

    Returns:
        The trial.
    """
    started = time.monotonic()
    backend = backend if mode.compiles else None
    name = "" if backend is None else getattr(backend, "__name__", str(backend))
    option = subject.option
    trial = Trial(subject.case.name, mode.name, option.name, name, Status.REFUSED, simulated=size)
    if not has_option(mode, option):
        return replace(trial, reason=f"{mode.name} has no such option")
    if reason := not_simulated(mode, option):
        return replace(trial, reason=reason)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        with simulated(size) as (world, sends), mode.running():
            fields = Lockstep(subject, mode, backend, world, sends).judged()
    return replace(trial, seconds=round(time.monotonic() - started, 3), **fields)


def not_simulated(mode: Engine, option: Option) -> str:
    """Why a mode or an option cannot be simulated; empty if it can."""
    # an optimizer that is divided among the ranks gathers its state
    if mode.is_sharded or mode.captures_backward or isinstance(mode, Zero):
        return f"the mode {mode.name} {NOT_SIMULATED}"
    scales = option.recipe is not None and option.recipe.scales
    if not option.local or option.resumes or scales:
        return f"the option {option.name} {NOT_SIMULATED}"
    return ""
