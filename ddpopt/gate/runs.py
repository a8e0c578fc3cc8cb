"""What one mode does with a case, on the ranks that are there: judged, counted, and its overlap potential.

Two runs of each mode. In the first nothing is registered with DDP, so its graphs and collectives are those of
a user's training; verification judges it. The second has a communication hook that sees each bucket leave.

Invariant: whatever a mode does, all ranks take part in the same collectives, and give the same figures.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ddpopt.cases.case import Case, step_seed
from ddpopt.dynamo.backend import find_compiler
from ddpopt.gate.figures import ModeFigures
from ddpopt.gate.potential import Measurement, measure, ratio_to_eager
from ddpopt.judge.judge import EXACT, judge
from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Bench, Reference, Subject
from ddpopt.judge.modes import Mode, Setup, mode
from ddpopt.judge.options import option
from ddpopt.judge.report.wording import share
from ddpopt.judge.training import Trainer, on_device
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks

COLLECTIVE_LIMIT_S = 60.0
DIGITS = 3


def mode_figures(
    case: Case, modes: Sequence[str], backend: Any, steps: int, ranks: Ranks
) -> tuple[dict[str, ModeFigures], dict[str, str]]:
    """Run a case in some modes, and judge each. A collective of all ranks.

    Args:
        case: the case.
        modes: their names.
        backend: of Dynamo: a name or a callable.
        steps: how many steps of training the judged run has.
        ranks: the ranks that are there.

    Returns:
        By mode what it did, and by mode what is wrong with it; a mode that fails has no figures.
    """
    figures: dict[str, ModeFigures] = {}
    wrong: dict[str, str] = {}
    bench = Bench(Subject(case, option("default"), steps, ranks.device), ranks)
    try:
        reference = Reference.make(bench)
        if reference is None:
            texts = "; ".join(dict.fromkeys(failure.text for failure in bench.failures))
            return {}, dict.fromkeys(modes, f"eager DDP itself fails: {texts}")
        eager = _potential(case, mode("eager"), None, ranks)
        for name in modes:
            trial, record = _judged(reference, mode(name), backend)
            if trial.status is not Status.OK:
                wrong[name] = _complaint(trial)
            if not any(ranks.gather(record is None or not trial.measured)):
                own = _potential(case, mode(name), backend, ranks)
                if isinstance(own, str) or isinstance(eager, str) or record is None:
                    said = own if isinstance(own, str) else eager
                    wrong.setdefault(name, f"its overlap potential cannot be measured: {said}")
                    continue
                lowest = min(ranks.gather(round(ratio_to_eager(own.potential, eager.potential), DIGITS)))
                figures[name] = _figures(record, trial, own.compiled, lowest)
    finally:
        bench.close()
    return figures, wrong


def _judged(reference: Reference, how: Mode, backend: Any) -> tuple[Trial, Record | None]:
    """A trial as `ddpopt.verify` has it, and the record that it judged; None if the run failed."""
    trainers: list[Trainer] = []
    trial = judge(reference, how, backend, tamper=trainers.append, exact=backend in EXACT)
    finished = [one.record for one in trainers if len(one.record.steps) == reference.bench.subject.steps]
    return trial, finished[0] if finished else None


def _complaint(trial: Trial) -> str:
    said = [f"{finding.level}: {finding.message}" for finding in trial.findings[:3]]
    return f"{trial.status}: {trial.reason or '; '.join(said)}"


def _figures(record: Record, trial: Trial, compiled: int, potential: float) -> ModeFigures:
    iterations = record.iterations or ()
    everything = Counter(collective.op for collective in record.collectives)
    inside = [Counter(collective.op for collective in one.collectives) for one in iterations]
    first = [compile_id for compile_id in record.graphs if compile_id.endswith("/0")]
    margins: dict[str, float] = {}
    for measured in trial.measured:
        margins[measured.level] = max(margins.get(measured.level, 0.0), share(measured))
    return ModeFigures(
        graphs=len(first),
        recompiles=len(record.graphs) - len(first),
        compiled=compiled,
        backward=_sorted(inside[-1] if inside else Counter()),
        outside=_sorted(everything - sum(inside, Counter())),
        aligned=_is_aligned(record),
        potential=potential,
        margins={level: round(margins[level], DIGITS) for level in sorted(margins)},
    )


def _sorted(counts: Counter[str]) -> dict[str, int]:
    return {op: counts[op] for op in sorted(counts)}


def _is_aligned(record: Record) -> bool:
    """Whether every backward reduced the planned buckets; with no plan in force, a single one."""
    seen = [[frozenset(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
    if record.plan is None:
        return all(len(buckets) <= 1 for buckets in seen)
    planned = [frozenset(bucket.params) for bucket in record.plan.buckets]
    return bool(seen) and all(buckets == planned for buckets in seen)


# ----------------------------------------------------------------------------------------- overlap potential


class Counted:
    """A backend that counts how often it is asked in the first step; recompilations come later.

    Args:
        backend: what is asked.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.calls = 0
        self._backend = backend
        self._counts = True

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile."""
        self.calls += self._counts
        return self._backend(gm, example_inputs, **options)

    def at_step(self, index: int) -> int:
        """Note which step begins, and give it back."""
        self._counts = index == 0
        return index


@dataclass(frozen=True)
class _Own:
    """What the run with a communication hook gave: a mode's own overlap potential, and compilations."""

    potential: float
    compiled: int


def _potential(case: Case, how: Mode, backend: Any, ranks: Ranks) -> _Own | str:
    """Run a mode with a communication hook; the first failure of any rank where there is one."""
    failure, found = "", _Own(0.0, 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _run_hooked(case, how, backend, ranks)
    except Exception as error:  # every rank says how it went, so that none waits for one that failed
        failure = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    failures = [said for said in ranks.gather(failure) if said]
    return failures[0] if failures else found


def _run_hooked(case: Case, how: Mode, backend: Any, ranks: Ranks) -> _Own:
    counted = None if backend is None else Counted(find_compiler(backend))
    with how.running(), fresh_group() as group:
        measured = _measured(case, how, counted, group, ranks)
    return _Own(measured.potential, counted.calls if counted else 0)


def _measured(
    case: Case, how: Mode, counted: Counted | None, group: dist.ProcessGroup, ranks: Ranks
) -> Measurement:
    """In a frame of its own, with which all that holds the group goes."""
    torch.manual_seed(step_seed(0, 0))
    parallel = how.wrap(Setup(case.model().to(ranks.device), group, counted, case.ddp_kwargs))
    if parallel.ddp is None:
        raise RuntimeError(f"{how.name} has no DDP module; this is a bug in ddpopt")

    def loss(step: int) -> torch.Tensor:
        torch.manual_seed(step_seed(ranks.rank, counted.at_step(step) if counted else step))
        args, kwargs = on_device(case.inputs(ranks.rank, step), ranks.device)
        return case.loss(parallel.call(*args, **kwargs))

    return measure(parallel.ddp, loss)


@contextlib.contextmanager
def fresh_group() -> Iterator[dist.ProcessGroup]:
    """A process group of all ranks, for the time of a block."""
    group: Any = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_LIMIT_S))
    try:
        yield group
    finally:
        gc.collect()  # reducers go before their process group
        dist.destroy_process_group(group)
