"""What each rank does in a verification: all requested trials, one after the other.

Invariant: all ranks judge the same trials in the same order, and rank 0 reports each as it begins and ends.
"""

import contextlib
import ctypes
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddpopt.cases.case import Case
from ddpopt.cases.option_cases import in_dtype
from ddpopt.cases.targets import resolve
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.meshes import Grid, Sizes, require_parts
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.outcome import without_reference
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.simulation.simulate import simulate
from ddpopt.judge.training.options import option
from ddpopt.judge.trajectory.free import free_runs
from ddpopt.judge.trials.following import follow
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.trials.resuming import resume
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks

STEPS = 3
"""DDP rebuilds its buckets before the second step; the third is the first in which everything has settled."""
TRIAL_LIMIT_S = 300.0
COLLECTIVE_SHARE = 0.8
"""Of a trial's limit: a rank may wait most of it for a compiling peer, and must then still report that."""


@dataclass(frozen=True)
class Request:
    """A request to verify a case under an option, in some modes.

    Attributes:
        target: the case, or the name that it has in other processes.
        option: name of the option.
        modes: the modes: names that other processes know, or engines.
    """

    target: str | Case
    option: str
    modes: tuple[str | Engine, ...]


@dataclass(frozen=True)
class Settings:
    """The settings of all trials of a verification.

    Attributes:
        backend: a backend of Dynamo: its name, or a callable.
        steps: how many steps of training.
        dtype: name of the dtype to compute in; None for the case's own.
        trial_limit_s: limit of one trial, and of eager's runs before the first one, in seconds.
        mesh: see `ddpopt.judge.engines.meshes`; None if each rank trains a whole model.
        simulate: the number of ranks that one process simulates; 0 for ranks of their own.
        trajectory: the number of steps that are also trained freely, each from where the last one ended; 0
            for none.
    """

    backend: Any = "inductor"
    steps: int = STEPS
    dtype: str | None = None
    trial_limit_s: float = TRIAL_LIMIT_S
    mesh: Sizes | None = None
    simulate: int = 0
    trajectory: int = 0

    @property
    def ways(self) -> tuple[int, ...]:
        """The trials of each mode: the steps of its trajectory, 0 for single steps."""
        return (0, self.trajectory) if self.trajectory else (0,)

    @property
    def collective_limit_s(self) -> float:
        """How long a rank waits for its peers, in seconds."""
        return COLLECTIVE_SHARE * self.trial_limit_s


@dataclass(frozen=True)
class Started:
    """An event: a trial begins.

    Attributes:
        index: its place among all requested trials.
        case: name of its case.
        option: name of its option.
        mode: name of its mode; empty while the reference runs.
        way: how it is judged, as `ddpopt.judge.verdict.Trial.way`.
    """

    index: int
    case: str
    option: str
    mode: str
    way: str = ""


@dataclass(frozen=True)
class Ended:
    """An event: a trial has ended.

    Attributes:
        index: its place among all requested trials.
        trial: the trial with its result.
    """

    index: int
    trial: Trial


def on_rank(ranks: Ranks, requests: Sequence[Request], settings: Settings, done: Sequence[int]) -> None:
    """Run as a rank started by us: report the hardware, and judge what is not done."""
    ranks.emit(hardware(ranks.device))
    with gc_frozen():  # otherwise each garbage collection would visit all imported objects
        run_trials(ranks, requests, settings, done, collect_and_freeze)


def run_trials(
    ranks: Ranks,
    requests: Sequence[Request],
    settings: Settings,
    done: Sequence[int] = (),
    before_each: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Judge the requested trials that are not done; `before_each` is called before each case and option."""
    trials: list[Trial] = []
    all_of_them = enumerate(requested_trials(requests, settings))
    for request in requests:
        left = [
            (i, trial)
            for i, trial in itertools.islice(all_of_them, len(request.modes) * len(settings.ways))
            if i not in done
        ]
        if left:
            before_each()
            take = _simulated if settings.simulate else _judged
            trials += take(ranks, request, settings, left)
    return trials


def requested_trials(requests: Sequence[Request], settings: Settings) -> Iterator[Trial]:
    """All requested trials, each with the status that it has until it is judged."""
    backend = getattr(settings.backend, "__name__", str(settings.backend))
    for request in requests:
        case = request.target if isinstance(request.target, str) else request.target.name
        for name in request.modes:
            engine = mode(name)
            compiler = backend if engine.compiles else ""
            single = Trial(
                case, engine.name, request.option, compiler, Status.BROKEN, simulated=settings.simulate
            )
            yield from (replace(single, trajectory=steps) for steps in settings.ways)


def hardware(device: torch.device) -> str:
    """Name what a rank computes on: ``"cpu"``, or ``"cuda"`` with the name of the GPU."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude imported objects from garbage collection, in a process of our own."""
    nested = gc.get_freeze_count() > 0
    _load_compiler()
    collect_and_freeze()
    try:
        yield
    finally:
        if not nested:  # what was frozen before stays frozen
            gc.unfreeze()


def collect_and_freeze() -> None:
    """Collect garbage, then exclude what is left from later collections: modules, Dynamo's caches.

    Hundreds of compilations fragment the memory, which glibc gives back to the system only on request.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()


def _load_compiler() -> None:
    """Import what the first compilation imports, so that it is excluded too."""
    compiled = torch.compile(lambda x: x * 2, backend="aot_eager")
    compiled(torch.ones(2, requires_grad=True)).sum().backward()


def _judged(
    ranks: Ranks, request: Request, settings: Settings, left: Sequence[tuple[int, Trial]]
) -> Iterator[Trial]:
    """Judge the modes of one case under one option."""
    case = _in_dtype_of(settings, resolve(request.target))
    require_parts(case, settings.mesh)
    grid = Grid(settings.mesh, ranks.rank, ranks.size)
    engines = {each.name: each for each in map(mode, request.modes)}
    subject = Subject(grid.case(case), option(request.option), settings.steps, ranks.device, grid=grid)
    ranks.emit(Started(left[0][0], case.name, request.option, ""))
    with contextlib.ExitStack() as benches:
        with ranks.limited(settings.trial_limit_s, f"{case.name}: eager DDP / {request.option}"):
            bench = Bench(subject, ranks, settings.collective_limit_s, resume)
            benches.callback(bench.close)
            reference = Reference.make(bench)
            impossible = without_reference(bench.failures, bench.stalled) if reference is None else {}
        runs = None
        if reference is not None and settings.trajectory:
            runs = benches.enter_context(free_runs(reference, settings.trajectory))
        singles: dict[str, Trial] = {}
        for index, trial in left:
            engine = engines[trial.mode]
            ranks.emit(Started(index, case.name, request.option, trial.mode, trial.way))
            with ranks.limited(settings.trial_limit_s, f"{case.name}: {trial.mode} / {request.option}"):
                if reference is None:
                    trial = replace(trial, case=case.name, **impossible)
                elif trial.trajectory and runs is not None:
                    single = singles.get(engine.name) or judge(reference, engine, settings.backend)
                    trial = follow(runs, engine, settings.backend, single)
                else:
                    trial = singles[engine.name] = judge(reference, engine, settings.backend)
                trial = _with_remark_on_time(trial, settings.trial_limit_s)
            ranks.emit(Ended(index, trial))
            yield trial


def _simulated(
    ranks: Ranks, request: Request, settings: Settings, left: Sequence[tuple[int, Trial]]
) -> Iterator[Trial]:
    """Judge the modes of one case under one option, on ranks that this process simulates."""
    case = _in_dtype_of(settings, resolve(request.target))
    engines = {each.name: each for each in map(mode, request.modes)}
    subject = Subject(case, option(request.option), settings.steps, ranks.device)
    for index, trial in left:
        ranks.emit(Started(index, case.name, request.option, trial.mode))
        with ranks.limited(settings.trial_limit_s, f"{case.name}: {trial.mode} / {request.option}"):
            trial = simulate(subject, engines[trial.mode], settings.backend, settings.simulate)
            trial = _with_remark_on_time(trial, settings.trial_limit_s)
        ranks.emit(Ended(index, trial))
        yield trial


def _in_dtype_of(settings: Settings, case: Case) -> Case:
    return case if settings.dtype is None else in_dtype(case, getattr(torch, settings.dtype))


def _with_remark_on_time(trial: Trial, limit_s: float) -> Trial:
    """A trial that says so if it came near its limit, which a busier machine would pass."""
    if trial.seconds <= limit_s / 2:
        return trial
    note = f"more than half of the time limit was used: {trial.seconds:.1f} of {limit_s:g} s"
    return replace(trial, notes=(*trial.notes, note))
