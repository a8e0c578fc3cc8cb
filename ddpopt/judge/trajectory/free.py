"""Eager DDP's free run of a subject, and its neighbors.

Invariant: all ranks take part in every run, so every method is a collective of all ranks.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from ddpopt.cases.option_cases import in_dtype
from ddpopt.judge.engines.engine import Engine, Named
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench
from ddpopt.judge.rules.failing import own_of, told
from ddpopt.judge.rules.outcome import without_reference
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.rules.rounding import perturbed, perturbed_state, widened
from ddpopt.judge.training.record import NumberKind
from ddpopt.judge.training.trainer import Option, Trainer
from ddpopt.judge.training.updating import LEARNING_RATE, MOMENTUM, Recipe
from ddpopt.judge.trajectory.envelope import NEIGHBORS, NOWHERE, Band, Distance, band, is_explained
from ddpopt.judge.trajectory.track import ComparedRun, KnownNumber, Track

WITH_STATE = Recipe(SGD, {"lr": LEARNING_RATE, "momentum": MOMENTUM})
"""Of an option that trains without an optimizer, whose state would be the first to carry an error on."""
Tamper = Callable[[Trainer], None]


def has_state(engine: Engine, option: Option) -> bool:
    """Whether an engine is trained with an optimizer that has state."""
    return option.recipe is not None or not engine.replaces("step") or engine.replaces("optimizer")


class FreeRun:
    """Eager DDP on its own for many steps.

    Args:
        reference: eager's few steps of the same subject.
        steps: the number of steps.
        folder: an empty folder for its numbers.
        has_state: whether an optimizer that has state updates the parameters, also without one in the option.

    Attributes:
        bench: the bench of all runs.
        track: its numbers.
        unjudged: what could not be found out, with the reason.
    """

    def __init__(self, reference: Reference, steps: int, folder: Path, *, has_state: bool) -> None:
        bench = reference.bench
        option = bench.subject.option
        if has_state and option.recipe is None:
            option = replace(option, recipe=WITH_STATE)
        option = replace(option, probes=False, extras=False)
        subject = replace(bench.subject, option=option, steps=steps, evaluates=False)
        self.reference = reference
        self.bench = Bench(subject, bench.ranks, bench.collective_limit_s)
        self.bench.has_momentum = has_state
        self.track = Track(folder)
        self.unjudged: tuple[str, ...] = ()
        self._bands: list[dict[str, Band]] | None = None

    def run(self) -> bool:
        """Train in eager DDP; whether it runs."""
        return self.bench.run(mode("eager"), None, each=self.track.keep, tamper=_less) is not None

    def next_to(self, engine: Engine, backend: Any, tamper: Tamper) -> ComparedRun | None:
        """Train freely in a mode; None if that fails on any rank."""
        run = ComparedRun(self.track, is_judged=True)

        def tampered(trainer: Trainer) -> None:
            _less(trainer)
            tamper(trainer)

        record = self.bench.run(engine, backend, each=run.take, tamper=tampered)
        if record is None:
            return None
        run.graphs = len(record.graphs)
        return run

    def bands(self) -> list[dict[str, Band]]:
        """The envelope of each number at each step."""
        if self._bands is None:
            neighbors = list(self._neighbors())
            wide = self._in_float64()
            self._bands = [
                _bands_at(place, numbers, neighbors, wide) for place, numbers in enumerate(self.track.steps)
            ]
        return self._bands

    def _in_float64(self) -> ComparedRun | None:
        """Eager in float64; None if that fails."""
        state = widened(self.reference.eager.start)
        run = ComparedRun(self.track, is_wide=True)
        case = in_dtype(self.bench.subject.adapted, torch.float64)
        begin = partial(_from, state)
        record = self.bench.run(mode("eager"), None, case=case, each=run.take, tamper=begin)
        return None if record is None else run

    def _neighbors(self) -> Iterator[ComparedRun]:
        """Eager on data that rounding cannot tell apart, from parameters that it cannot tell apart."""
        case = self.bench.subject.adapted
        computes = self.reference.computes
        start = self.reference.eager.start
        for number in range(1, NEIGHBORS + 1):
            state = perturbed_state(start, number, computes)
            run = ComparedRun(self.track)
            begin = partial(_from, state)
            moved = perturbed(case, number, computes)
            if self.bench.run(mode("eager"), None, case=moved, each=run.take, tamper=begin) is not None:
                yield run
            else:
                why = told(own_of(self.bench.failures))
                self.unjudged += (f"neighboring run {number} of {NEIGHBORS} ({why})",)


def _less(trainer: Trainer) -> None:
    """The state of the process at each step is judged in the single steps."""
    trainer.sees_all = False


def _from(state: Named, trainer: Trainer) -> None:
    """Begin with these parameters and buffers."""
    _less(trainer)
    trainer.parallel.load(state)


def _bands_at(
    place: int,
    numbers: Mapping[str, KnownNumber],
    neighbors: Sequence[ComparedRun],
    wide: ComparedRun | None,
) -> dict[str, Band]:
    """The envelope of each number at one step.

    A run in float64 counts for every number of the step if its forward takes eager's path; else for those
    that are near to eager's.
    """
    distances = {name: [_distance(run, place, name) for run in neighbors] or [NOWHERE] for name in numbers}
    own = {name: NOWHERE if wide is None else _distance(wide, place, name) for name in numbers}
    near = {name: is_explained(known.scale, distances[name], own[name]) for name, known in numbers.items()}
    forward = [near[name] for name, known in numbers.items() if known.kind is NumberKind.FORWARD]
    same_path = bool(forward) and all(forward)
    return {
        name: band(known.scale, distances[name], own[name] if same_path or near[name] else None)
        for name, known in numbers.items()
    }


def _distance(neighbor: ComparedRun, place: int, name: str) -> Distance:
    if place >= len(neighbor.steps) or name not in neighbor.steps[place]:
        return NOWHERE
    return neighbor.steps[place][name].distance


class FreeRuns:
    """Eager's free runs of a subject: with an optimizer that has state, and without.

    Args:
        reference: eager's few steps.
        steps: the number of steps.
        folder: an empty folder.

    Attributes:
        failed: the fields of a trial without it.
    """

    def __init__(self, reference: Reference, steps: int, folder: Path) -> None:
        self.reference = reference
        self.steps = steps
        self._folder = folder
        self._runs: dict[bool, FreeRun | None] = {}
        self._open: list[Bench] = []
        self.failed: dict[str, Any] = {}

    def of(self, engine: Engine) -> FreeRun | None:
        """Eager's run for an engine; None if eager fails, in which case `failed` says how."""
        wants_state = has_state(engine, self.reference.bench.subject.option)
        run = self._run(has_state=wants_state)
        if run is None and wants_state:  # not every optimizer takes every gradient
            run = self._run(has_state=False)
        return run

    def _run(self, *, has_state: bool) -> FreeRun | None:
        if has_state not in self._runs:
            folder = self._folder / f"{has_state}"
            folder.mkdir()
            free = FreeRun(self.reference, self.steps, folder, has_state=has_state)
            self._open.append(free.bench)
            self._runs[has_state] = free if free.run() else None
            self.failed = without_reference(free.bench.failures, free.bench.stalled)
        return self._runs[has_state]

    def close(self) -> None:
        """Destroy the process groups."""
        for bench in self._open:
            bench.close()


@contextmanager
def free_runs(reference: Reference, steps: int) -> Iterator[FreeRuns]:
    """Eager's free runs, whose files are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="ddpopt-trajectory-") as folder:
        runs = FreeRuns(reference, steps, Path(folder))
        try:
            yield runs
        finally:
            runs.close()
