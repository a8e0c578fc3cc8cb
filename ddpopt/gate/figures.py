"""The gate's measurements of a case on existing ranks: its plan, and each mode.

Each mode runs twice. The first run registers nothing with DDP, so its graphs and collectives are those of a
user's training; verification judges it. The second has a communication hook that sees when each bucket
leaves.

Invariant: even if a mode fails, all ranks take part in the same collectives and return the same figures.
"""

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ddpopt.cases.case import Case, step_seed
from ddpopt.dynamo.backend import find_compiler
from ddpopt.dynamo.capture import capture
from ddpopt.errors import UsageError
from ddpopt.gate.baseline import Figure, Measuring
from ddpopt.gate.overlap import measure, ratio_to_eager
from ddpopt.judge.engines.engine import Engine
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.failing import in_words
from ddpopt.judge.rules.outcome import EXACT
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.training.record import Record
from ddpopt.judge.training.trainer import Trainer
from ddpopt.judge.trajectory.free import FreeRuns, free_runs
from ddpopt.judge.trials.following import follow
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks, new_group
from ddpopt.terminal.tables import mib

COLLECTIVE_LIMIT_S = 60.0
DIGITS = 3
PLAN = "plan"
OK = "ok"
FAILURE = "failure"
VERDICT = "verdict"
TRAJECTORY = "verdict on its trajectory"
EQUAL = "equal to eager DDP, bit for bit"
WITHIN = "within the rounding of eager DDP"
"""What a trajectory is if it is right: words, so that they are the same on every machine."""
OVERLAP = "overlap, as a share of eager DDP's"


def failures(figures: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """The failures that keep a case's figures out of a baseline."""
    found = []
    for place, measured in figures.items():
        for name, value in measured.items():
            fails = name == FAILURE or (name == VERDICT and value != OK)
            fails |= name == TRAJECTORY and value not in (EQUAL, WITHIN)
            if fails or (name == OVERLAP and isinstance(value, str)):
                found.append(f"{place}: {name}: {value}")
    return found


def case_figures(
    case: Case, settings: Measuring, backend: Any, ranks: Ranks
) -> dict[str, Mapping[str, Figure]]:
    """Plan a case, and run it in every mode. A collective of all ranks.

    Args:
        case: the case, with its own arguments for DDP.
        settings: modes and steps.
        backend: the Dynamo backend: a name or a callable.
        ranks: the existing ranks.

    Returns:
        The figures of its plan and of each mode; a failure is reported in place of figures.
    """
    plans = ranks.gather(plan_figures(case))
    plan = plans[0]
    if any(other != plan for other in plans):
        prints = [each.get("fingerprint") for each in plans]
        plan = {FAILURE: f"ranks plan differently: fingerprints {prints}"}
    return {PLAN: plan, **_mode_figures(case, settings, backend, ranks)}


def plan_figures(case: Case) -> dict[str, Figure]:
    """A case's plan, made as `ddpopt.plan` makes it, from the inputs of rank 0's first step."""
    args, kwargs = case.inputs(0, 0)
    try:
        with torch.enable_grad():
            plan = capture(case.model(), *args, **kwargs, **case.ddp_kwargs).plan
    except UsageError as error:
        return {FAILURE: f"it cannot be planned: {error}"}
    buckets: dict[str, Figure] = {
        f"bucket {index}": [f"{mib(bucket.nbytes)} MiB {bucket.dtype}", *bucket.params]
        for index, bucket in enumerate(plan.buckets)
    }
    return {
        "fingerprint": plan.fingerprint,
        "segments": len(plan.segments),
        "unread parameters": list(plan.unread),
        **buckets,
    }


def _mode_figures(
    case: Case, settings: Measuring, backend: Any, ranks: Ranks
) -> dict[str, Mapping[str, Figure]]:
    bench = Bench(Subject(case, option("default"), settings.steps, ranks.device), ranks)
    with contextlib.closing(bench):
        reference = Reference.make(bench)
        if reference is None:
            texts = "; ".join(dict.fromkeys(failure.text for failure in bench.failures))
            return {name: {VERDICT: f"eager DDP itself fails: {texts}"} for name in settings.modes}
        eager = _overlap(case, mode("eager"), None, ranks)
        with free_runs(reference, settings.trajectory) as runs:
            return {name: _of_mode(mode(name), runs, backend, eager, case, ranks) for name in settings.modes}


def _of_mode(
    how: Engine, runs: FreeRuns, backend: Any, eager: "_Overlap", case: Case, ranks: Ranks
) -> dict[str, Figure]:
    trainers: list[Trainer] = []
    reference = runs.reference
    trial = judge(reference, how, backend, tamper=trainers.append, exact=backend in EXACT)
    finished = [one.record for one in trainers if len(one.record.steps) == reference.bench.subject.steps]
    verdict: dict[str, Figure] = {VERDICT: _verdict(trial)}
    if runs.steps:
        verdict[TRAJECTORY] = _of_trajectory(follow(runs, how, backend, trial))
    if any(ranks.gather(not finished or not trial.measured)):
        return verdict
    own = _overlap(case, how, backend, ranks)
    return {
        **verdict,
        "levels": list(trial.levels),
        **_run_figures(finished[0]),
        "compiled by the backend": own[1],
        OVERLAP: _ratio(own[0], eager[0], ranks),
    }


def _of_trajectory(trial: Trial) -> str:
    if trial.status is not Status.OK:
        return _verdict(trial)
    return EQUAL if trial.notes[0].startswith(EQUAL) else WITHIN


def _verdict(trial: Trial) -> str:
    if trial.status is Status.OK:
        return OK
    said = [f"{finding.level}: {finding.message}" for finding in trial.findings[:3]]
    return f"{trial.status}: {trial.reason or '; '.join(said)}"


def _run_figures(record: Record) -> dict[str, Figure]:
    iterations = record.iterations or ()
    everything = Counter(collective.op for collective in record.collectives)
    inside = [Counter(collective.op for collective in one.collectives) for one in iterations]
    first = [compile_id for compile_id in record.graphs if compile_id.endswith("/0")]
    return {
        "graphs": len(first),
        "recompiles": len(record.graphs) - len(first),
        "collectives per backward": _counts(inside[-1] if inside else Counter()),
        "collectives outside backward": _counts(everything - sum(inside, Counter())),
        "planned = observed buckets": "yes" if _is_aligned(record) else "no",
    }


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[op]} {op}" for op in sorted(counts)) or "none"


def _is_aligned(record: Record) -> bool:
    """Whether every backward reduced the planned buckets; without a plan, a single bucket."""
    seen = [[frozenset(bucket.params) for bucket in one.buckets] for one in record.iterations or ()]
    if record.plan is None:
        return all(len(buckets) <= 1 for buckets in seen)
    planned = [frozenset(bucket.params) for bucket in record.plan.buckets]
    return bool(seen) and all(buckets == planned for buckets in seen)


# --------------------------------------------------------------------------------------------------- overlap

_Overlap = tuple[float | str, int]
"""A mode's overlap potential, or how measuring it failed; and how often the backend was asked to compile."""


def _ratio(own: float | str, eager: float | str, ranks: Ranks) -> float | str:
    """The lowest ratio of all ranks; or the failure, if measuring failed."""
    if isinstance(own, str):
        return own
    if isinstance(eager, str):
        return f"eager DDP: {eager}"
    lowest: float = min(ranks.gather(round(ratio_to_eager(own, eager), DIGITS)))
    return lowest


class CountingBackend:
    """A backend that counts its calls in the first step; recompilations come later.

    Args:
        backend: the backend that compiles.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.calls = 0
        self.counts = True
        self._backend = backend

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """Compile."""
        self.calls += self.counts
        return self._backend(gm, example_inputs, **options)


def _overlap(case: Case, how: Engine, backend: Any, ranks: Ranks) -> _Overlap:
    """Run a mode with a communication hook; returns the first failure of any rank, if there is one."""
    failure = ""
    counted = CountingBackend(find_compiler(backend or "eager"))
    potential = 0.0
    try:
        with warnings.catch_warnings(), how.running(), _fresh_group() as group:
            warnings.simplefilter("ignore")
            potential = _measured(case, how, counted, group, ranks)
    except Exception as error:  # every rank reports its result, so that none waits for a failed rank
        failure = f"rank {ranks.rank}: {in_words(error)}"
    said = [text for text in ranks.gather(failure) if text]
    return (said[0] if said else potential), counted.calls


def _measured(
    case: Case, how: Engine, counted: CountingBackend, group: dist.ProcessGroup, ranks: Ranks
) -> float:
    """Runs in its own frame, so that all references to the group end with it."""
    torch.manual_seed(step_seed(0, 0))
    backend = counted if how.compiles else None
    parallel = how.prepared(case.model().to(ranks.device), group, backend, case.ddp_kwargs)
    if parallel.ddp is None:
        raise RuntimeError(f"{how.name} has no DDP module; this is a bug in ddpopt")

    def loss(step: int) -> torch.Tensor:
        counted.counts = step == 0
        return case.on(ranks.device).step(parallel.call, ranks.rank, step)

    return measure(parallel.ddp, loss).potential


@contextlib.contextmanager
def _fresh_group() -> Iterator[dist.ProcessGroup]:
    """A process group of all ranks that exists for the duration of the block."""
    group = new_group(COLLECTIVE_LIMIT_S)
    try:
        yield group
    finally:
        gc.collect()  # free reducers before their process group
        dist.destroy_process_group(group)
