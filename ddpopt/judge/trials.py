"""What each rank does in a verification: all that was asked, one trial after the other.

Invariant: all ranks judge the same trials in the same order, and rank 0 tells of each as it begins and ends.
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
"""DDP rebuilds its buckets before the second step; the third is the first that all has settled in."""
TRIAL_LIMIT_S = 300.0
COLLECTIVE_SHARE = 0.8
"""Of a trial's limit: a rank may wait for a peer that compiles for most of it, and has yet to say so."""


@dataclass(frozen=True)
class Asked:
    """One thing to verify: a case under an option, and the modes to judge there.

    Attributes:
        target: names the case in other processes, or is it.
        option: name of the option.
        modes: names of the modes.
    """

    target: str | Case
    option: str
    modes: tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """What holds for all trials of a verification.

    Attributes:
        backend: of Dynamo: a name, or a callable.
        steps: how many steps of training.
        dtype: name of the dtype to compute in; None for the case's own.
        trial_limit_s: limit of one trial, and of eager's runs before the first one, in seconds.
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
        index: which one, of all that were asked for.
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
        index: which one, of all that were asked for.
        trial: how.
    """

    index: int
    trial: Trial


def on_rank(ranks: Ranks, asked: Sequence[Asked], settings: Settings, done: Sequence[int]) -> None:
    """Be a rank of our own: say what this computes on, and judge what is not done."""
    ranks.emit(hardware(ranks.device))
    with quickly():  # in a process of our own, whose garbage each run of the collector would look through
        run_trials(ranks, asked, settings, done, keep_for_good)


def run_trials(
    ranks: Ranks,
    asked: Sequence[Asked],
    settings: Settings,
    done: Sequence[int] = (),
    before_each: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Judge everything that was asked and is not done; before each case and option something may be done."""
    trials: list[Trial] = []
    all_of_them = enumerate(untried(asked, settings))
    for one in asked:
        left = [(i, trial) for i, trial in itertools.islice(all_of_them, len(one.modes)) if i not in done]
        if left:
            before_each()
            trials += _judged(ranks, one, settings, left)
    return trials


def untried(asked: Sequence[Asked], settings: Settings) -> Iterator[Trial]:
    """Every trial that is asked for, as it is when nothing was learned from it."""
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
    """Spare a process of our own runs of the garbage collector over what is imported: that is no garbage."""
    nested = gc.get_freeze_count() > 0
    _load_compiler()
    keep_for_good()
    try:
        yield
    finally:
        if not nested:  # what was spared before stays spared
            gc.unfreeze()


def keep_for_good() -> None:
    """Have the garbage collector look no more at what is there: modules, caches of Dynamo's."""
    gc.collect()
    gc.freeze()


def _load_compiler() -> None:
    """Import what the first compilation imports: it is no garbage either."""
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
    """What becomes of a trial that has nothing to be held against."""
    if bench.stalled:
        return {"reason": f"eager DDP's own runs did not finish: {bench.stalled}"}
    own = [failure for failure in bench.failures if not failure.lost] or bench.failures
    reason = f"eager DDP itself fails here: {'; '.join(dict.fromkeys(failure.text for failure in own))}"
    return {"status": Status.NOT_POSSIBLE, "reason": reason}
