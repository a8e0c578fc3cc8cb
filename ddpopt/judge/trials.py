"""Run a verification on each rank: all requested trials, one after another.

Invariant: all ranks judge the same trials in the same order, and rank 0 reports each as it begins and ends.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddpopt.cases.case import Case
from ddpopt.cases.targets import resolve
from ddpopt.judge.judge import judge
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.modes import mode
from ddpopt.judge.option_cases import in_dtype
from ddpopt.judge.options import option
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks

STEPS = 3
"""DDP rebuilds its buckets before the second step; from the third on everything is stable."""
TRIAL_LIMIT_S = 300.0
COLLECTIVE_SHARE = 0.8
"""Share of a trial's limit: a rank may wait most of it for a compiling peer, and must then still report."""


@dataclass(frozen=True)
class Asked:
    """One thing to verify: a case under an option, and the modes to judge.

    Attributes:
        target: the case itself, or its name for other processes.
        option: name of the option.
        modes: names of the modes.
    """

    target: str | Case
    option: str
    modes: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The settings of all trials of a verification.

    Attributes:
        backend: the Dynamo backend: a name, or a callable.
        steps: the number of training steps.
        dtype: name of the dtype to compute in; None for the case's own.
        trial_limit_s: limit of one trial, and of eager's runs before the first trial, in seconds.
    """

    backend: Any = "inductor"
    steps: int = STEPS
    dtype: str | None = None
    trial_limit_s: float = TRIAL_LIMIT_S

    @property
    def collective_limit_s(self) -> float:
        """How long a rank waits for its peers, in seconds."""
        return COLLECTIVE_SHARE * self.trial_limit_s


@dataclass(frozen=True)
class Started:
    """An event: a trial begins.

    Attributes:
        index: the index among all requested trials.
        case: name of its case.
        option: name of its option.
        mode: name of its mode; empty while the reference runs.
    """

    index: int
    case: str
    option: str
    mode: str


@dataclass(frozen=True)
class Ended:
    """An event: a trial has ended.

    Attributes:
        index: the index among all requested trials.
        trial: the result.
    """

    index: int
    trial: Trial


def on_rank(ranks: Ranks, asked: Sequence[Asked], settings: Settings, done: Sequence[int]) -> None:
    """Run as a rank that ddpopt started: report the device, and judge the trials that are not done."""
    ranks.emit(hardware(ranks.device))
    with quickly():  # only in a rank's own process, where each collection would scan all imported objects
        run_trials(ranks, asked, settings, done, keep_for_good)


def run_trials(
    ranks: Ranks,
    asked: Sequence[Asked],
    settings: Settings,
    done: Sequence[int] = (),
    before_each: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Judge every requested trial that is not done; a callback may run before each case and option."""
    trials: list[Trial] = []
    all_of_them = enumerate(untried(asked, settings))
    for one in asked:
        left = [(i, trial) for i, trial in itertools.islice(all_of_them, len(one.modes)) if i not in done]
        if left:
            before_each()
            trials += _judged(ranks, one, settings, left)
    return trials


def untried(asked: Sequence[Asked], settings: Settings) -> Iterator[Trial]:
    """Every requested trial with the result it has if nothing is learned from it."""
    backend = getattr(settings.backend, "__name__", str(settings.backend))
    for one in asked:
        case = one.target if isinstance(one.target, str) else one.target.name
        for name in one.modes:
            compiler = backend if mode(name).compiles else ""
            yield Trial(case, name, one.option, compiler, Status.BROKEN)


def hardware(device: torch.device) -> str:
    """Name what a rank computes on: ``"cpu"``, or ``"cuda"`` with the name of the GPU."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Keep the garbage collector from scanning imported modules in a rank's own process."""
    _load_compiler()
    keep_for_good()
    try:
        yield
    finally:
        gc.unfreeze()


def keep_for_good() -> None:
    """Exclude all present objects, such as modules and Dynamo's caches, from garbage collection."""
    gc.collect()
    gc.freeze()


def _load_compiler() -> None:
    """Import what the first compilation needs, so that it is excluded too."""
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()


def _judged(
    ranks: Ranks, asked: Asked, settings: Settings, left: Sequence[tuple[int, Trial]]
) -> Iterator[Trial]:
    """Judge the modes of one case under one option."""
    case = resolve(asked.target)
    if settings.dtype is not None:
        case = in_dtype(case, getattr(torch, settings.dtype))
    subject = Subject(case, option(asked.option), settings.steps, ranks.device)
    ranks.emit(Started(left[0][0], case.name, asked.option, ""))
    with contextlib.ExitStack() as benches:
        with ranks.limited(settings.trial_limit_s, f"{case.name}: eager DDP / {asked.option}"):
            bench = Bench(subject, ranks, settings.collective_limit_s)
            benches.callback(bench.close)
            reference = Reference.make(bench)
            impossible = _of_eager(bench) if reference is None else {}
        for index, trial in left:
            ranks.emit(Started(index, case.name, asked.option, trial.mode))
            with ranks.limited(settings.trial_limit_s, f"{case.name}: {trial.mode} / {asked.option}"):
                if reference is None:
                    trial = replace(trial, case=case.name, **impossible)
                else:
                    trial = judge(reference, mode(trial.mode), settings.backend)
            ranks.emit(Ended(index, trial))
            yield trial


def _of_eager(bench: Bench) -> dict[str, Any]:
    """The result of a trial without a reference."""
    if bench.stalled:
        return {"reason": f"eager DDP's own runs did not end: {bench.stalled}"}
    own = [failure for failure in bench.failures if not failure.lost] or bench.failures
    reason = f"eager DDP itself fails here: {'; '.join(dict.fromkeys(failure.text for failure in own))}"
    return {"status": Status.NOT_POSSIBLE, "reason": reason}
