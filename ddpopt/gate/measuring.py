"""Having everything measured: on ranks that are started for it, or on those of this process.

Invariant: each case that was asked for has its figures, or a problem that says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddpopt.cases.case import resolve
from ddpopt.cases.corpus import cases
from ddpopt.errors import UsageError
from ddpopt.gate.bands import Bands
from ddpopt.gate.collected import collected
from ddpopt.gate.figures import CaseFigures, Figures, Ratio
from ddpopt.gate.plans import plan_figures
from ddpopt.gate.ratios import time_ratios
from ddpopt.gate.runs import mode_figures
from ddpopt.judge.backends import backend_of
from ddpopt.judge.trials import keep_for_good, quickly
from ddpopt.ranks.group import Ranks
from ddpopt.ranks.pool import launch

CORPUS = "corpus"
CASE_LIMIT_S = 900.0
RUN_LIMIT_S = 7200.0


@dataclass(frozen=True)
class Settings:
    """What is measured, and how; kept in the baseline, so that two runs measure the same.

    Attributes:
        targets: as on the command line; ``"corpus"`` stands for every case that ships.
        modes: names of the modes.
        backend: of Dynamo.
        nproc: how many ranks.
        steps: of training.
        device: ``"cpu"`` or ``"cuda"``.
        timed: targets that are timed.
        collected: folders whose tests are counted.
    """

    targets: tuple[str, ...] = (CORPUS,)
    modes: tuple[str, ...] = ("ddpopt-split", "ddpopt-inline")
    backend: str = "aot_eager"
    nproc: int = 2
    steps: int = 3
    device: str = "cpu"
    timed: tuple[str, ...] = ()
    collected: tuple[str, ...] = ()

    @property
    def named(self) -> tuple[str, ...]:
        """Every target by its own name."""
        each = ([case.name for case in cases()] if target == CORPUS else [target] for target in self.targets)
        return tuple(dict.fromkeys(name for names in each for name in names))

    def to_data(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Settings:
        """Read what `to_data` gave, by way of JSON."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return Settings(**values)


@dataclass(frozen=True)
class Problem:
    """Something that keeps a figure from being measured, or from being worth anything.

    Attributes:
        subject: the case or the folder.
        where: the mode; empty if it concerns all of it.
        message: what is wrong.
    """

    subject: str
    where: str
    message: str


@dataclass(frozen=True)
class Measured:
    """What a run measured.

    Attributes:
        figures: all that could be had.
        problems: all that could not, or is wrong in itself.
    """

    figures: Figures
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Began:
    """An event: a case begins, or the timing of one.

    Attributes:
        what: in a few words.
    """

    what: str


@dataclass(frozen=True)
class OneCase:
    """What the ranks say of a case.

    Attributes:
        name: the target.
        figures: what was measured; None if it has no plan.
        problems: what is wrong.
    """

    name: str
    figures: CaseFigures | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class OneTimed:
    """What timing a case gave.

    Attributes:
        name: the target.
        ratios: by what was timed.
        problems: what is wrong.
    """

    name: str
    ratios: Mapping[str, Ratio]
    problems: tuple[Problem, ...]


Tell = Callable[[Began], None]


def measure(settings: Settings, before: Figures, bands: Bands, tell: Tell) -> Measured:
    """Measure everything, on ranks of our own.

    Args:
        settings: what to measure.
        before: the baseline's figures; its ratios say which are worth another look.
        bands: how far a figure may stray.
        tell: told of each case as it begins.

    Returns:
        The figures, and the problems.

    Raises:
        UsageError: a target, a mode or the backend cannot be used.
        InfrastructureError: a rank died or stalled, or none could be had.
    """

    def heard(event: object) -> None:
        if isinstance(event, Began):
            tell(event)

    found: list[OneCase] = []
    if settings.named:
        found = _launched(_on_rank, settings, nproc=settings.nproc, settings=settings, heard=heard)
    timed: list[OneTimed] = []
    if settings.timed:
        known = {name: dict(before.ratios.get(name, {})) for name in settings.timed}
        timed = _launched(_time_on_rank, settings, known, bands, nproc=1, settings=settings, heard=heard)
    return assembled(found, timed, settings.collected)


def _launched(
    task: Callable[..., Any],
    *args: Any,
    nproc: int,
    settings: Settings,
    heard: Callable[[object], None],
) -> Any:
    """What rank 0 returned."""
    return launch(task, *args, nproc=nproc, limit_s=RUN_LIMIT_S, device=settings.device, on_event=heard)[0]


def _on_rank(ranks: Ranks, settings: Settings) -> list[OneCase]:
    backend = backend_of(settings.backend)
    found = []
    with quickly():
        for name in settings.named:
            ranks.emit(Began(name))
            keep_for_good()
            with ranks.limited(CASE_LIMIT_S, f"the gate: {name}"):
                found.append(measure_case(name, settings, backend, ranks))
    return found


def _time_on_rank(
    ranks: Ranks, settings: Settings, known: Mapping[str, Mapping[str, Ratio]], bands: Bands
) -> list[OneTimed]:
    backend = backend_of(settings.backend)
    found = []
    with quickly():
        for name in settings.timed:
            ranks.emit(Began(f"{name}, timed"))
            found.append(time_case(name, settings, backend, ranks, known[name], bands))
    return found


def time_case(
    name: str, settings: Settings, backend: Any, ranks: Ranks, before: Mapping[str, Ratio], bands: Bands
) -> OneTimed:
    """Time a case's planning and compiling; arguments as for `ddpopt.gate.ratios.time_ratios`."""
    ratios, wrong = time_ratios(resolve(name), settings.modes, backend, ranks, before, bands)
    return OneTimed(name, ratios, tuple(Problem(name, what, said) for what, said in wrong.items()))


def measure_case(name: str, settings: Settings, backend: Any, ranks: Ranks) -> OneCase:
    """Plan a case, and run it in every mode. A collective of all ranks.

    Args:
        name: the target.
        settings: modes and steps.
        backend: of Dynamo.
        ranks: the ranks that are there.

    Returns:
        Its figures, and what is wrong.
    """
    case = resolve(name)
    plan, failure = None, ""
    try:
        plan = plan_figures(case)
    except UsageError as error:
        failure = f"it cannot be planned: {error}"
    plans = ranks.gather((plan, failure))
    problems = [Problem(name, "plan", said) for _, said in plans[:1] if said]
    prints = [each.fingerprint if each else None for each, _ in plans]
    if len(set(prints)) > 1:
        problems.append(Problem(name, "plan", f"ranks plan differently: fingerprints {prints}"))
    figures, wrong = mode_figures(case, settings.modes, backend, settings.steps, ranks)
    problems += [Problem(name, where, said) for where, said in wrong.items()]
    return OneCase(name, None if plan is None else CaseFigures(plan, figures), tuple(problems))


def assembled(found: Sequence[OneCase], timed: Sequence[OneTimed], folders: Sequence[str]) -> Measured:
    """Put together what ranks measured, and count the tests of folders."""
    counts, failures = collected(folders)
    problems = [problem for one in found for problem in one.problems]
    problems += [problem for one in timed for problem in one.problems]
    problems += [Problem(folder, "", said) for folder, said in failures.items()]
    cases = {one.name: one.figures for one in found if one.figures is not None}
    return Measured(Figures(cases, {one.name: one.ratios for one in timed}, counts), tuple(problems))
