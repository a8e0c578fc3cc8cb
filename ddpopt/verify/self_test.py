"""Who judges the judge: every fault must be found, and clean runs must raise nothing.

Invariant: a fault that takes the ranks down counts as found, by whoever reported that; a clean run that was
not possible does not count as clean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend

from ddpopt.testing import corpus
from ddpopt.verify.faults import FAULTS, Fault
from ddpopt.verify.judge import judge
from ddpopt.verify.matrix import CASES
from ddpopt.verify.modes import mode
from ddpopt.verify.options import option
from ddpopt.verify.rank_failures import RanksFailed
from ddpopt.verify.ranks import Ranks, launch
from ddpopt.verify.reference import Bench, Reference, Subject
from ddpopt.verify.runner import verify_all
from ddpopt.verify.trials import STEPS, Asked, Ended, Settings, Started, quickly
from ddpopt.verify.verdict import Status, Trial, Verdict

FAULT_LIMIT_S = 60.0
RUN_LIMIT_S = 1800.0
CLEAN_RUNS = 200
CLEAN_MODES = ("ddpopt-split", "ddpopt-inline")
CLEAN_OPTIONS = ("default", "accumulation", "bucket_view", "zero_in_place")
FOUND_BY = {"CertificateError": "certificate", "PlanMismatchError": "agreement"}
"""Errors that ddpopt itself raises before anything is compared."""


@dataclass(frozen=True)
class Found:
    """What became of one fault.

    Attributes:
        fault: its name.
        layer: what it breaks.
        by: the levels that found it, or ``"certificate"``, ``"agreement"``, ``"run"`` (the step failed),
            ``"ranks"`` (a rank died or stalled); empty if nothing did.
        message: the first thing said of it.
    """

    fault: str
    layer: str
    by: tuple[str, ...]
    message: str


@dataclass(frozen=True)
class SelfTest:
    """How good the verification is.

    Attributes:
        found: one entry for each fault.
        clean: the verdict over clean runs.
    """

    found: tuple[Found, ...]
    clean: Verdict
    world_size: int = field(default=2)

    def __bool__(self) -> bool:
        return not self.missed and self.clean_runs == self.clean_asked

    def to_json(self) -> str:
        """Return faults, what found them, and the clean runs as a JSON object."""
        data = asdict(self) | {"right": bool(self), "clean_runs": self.clean_runs}
        data["clean"] = json.loads(self.clean.to_json())
        return json.dumps(data, indent=2)

    @property
    def missed(self) -> tuple[Found, ...]:
        """The faults that nothing found."""
        return tuple(found for found in self.found if not found.by)

    @property
    def clean_asked(self) -> int:
        """How many clean runs were asked for."""
        return len(self.clean.trials)

    @property
    def clean_runs(self) -> int:
        """How many clean runs ended, with nothing found."""
        return sum(trial.status is Status.OK for trial in self.clean.trials)


Progress = Callable[[Started | Ended], None]


def rounding(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
    """Compile like aot_eager, but be judged like a backend that may round otherwise."""
    return lookup_backend("aot_eager")(gm, list(example_inputs))


def self_test(
    nproc: int = 2,
    *,
    faults: Sequence[Fault] = FAULTS,
    clean_runs: int = CLEAN_RUNS,
    on_event: Progress = lambda _: None,
) -> SelfTest:
    """Put every fault in, and take clean runs over the corpus.

    Args:
        nproc: how many ranks to start.
        faults: the faults.
        clean_runs: how many clean runs, at least; the corpus is gone over with one option after the other.
        on_event: told of each trial as it begins and ends.

    Returns:
        What was found.

    Raises:
        InfrastructureError: no ranks could be had.
    """
    done: dict[int, Found] = {}
    running: list[Started] = []

    def note(event: Any) -> None:
        if isinstance(event, Ended):
            done[event.index] = _found(faults[event.index], event.trial)
            running.clear()
        else:
            running[:] = [event]
        on_event(event)

    while len(done) < len(faults):
        try:
            launch(
                _on_rank, faults, tuple(done), nproc=nproc, limit_s=RUN_LIMIT_S, device="cpu", on_event=note
            )
        except RanksFailed as failed:
            if not running:
                raise
            index = running[0].index
            running.clear()
            words = str(failed).splitlines()[0]
            done[index] = Found(faults[index].name, faults[index].layer, ("ranks",), words)
    clean = verify_all(
        "clean runs",
        clean_asked(clean_runs),
        Settings("aot_eager"),
        nproc=nproc,
        device="cpu",
        on_event=on_event,
    )
    return SelfTest(tuple(done[index] for index in range(len(faults))), clean, nproc)


def clean_asked(runs: int) -> list[Asked]:
    """Clean runs over the corpus, with one option after the other until there are enough."""
    asked: list[Asked] = []
    for name in CLEAN_OPTIONS:
        for case in corpus.cases():
            if len(asked) * len(CLEAN_MODES) >= runs:
                return asked
            if runs_clean(case.name, name):
                asked.append(Asked(case.name, name, CLEAN_MODES))
    return asked


def runs_clean(case: str, option_name: str) -> bool:
    """Whether a case goes with an option in eager: a static graph is recorded in a synchronised step."""
    static = bool(corpus.case(case).ddp_kwargs.get("static_graph"))
    return not (static and option_name == "accumulation")


def _on_rank(ranks: Ranks, faults: Sequence[Fault], done: Sequence[int]) -> None:
    with quickly():
        for index, fault in enumerate(faults):
            if index not in done:
                ranks.emit(Started(index, fault.case, fault.option, fault.name))
                with ranks.limited(FAULT_LIMIT_S, fault.name):
                    ranks.emit(Ended(index, try_fault(ranks, fault)))


def try_fault(ranks: Ranks, fault: Fault) -> Trial:
    """Judge a mode with a fault in it; a collective of all ranks.

    Args:
        ranks: the ranks.
        fault: the fault.

    Returns:
        The trial; wrong if the fault was found.
    """
    case = next(case for case in CASES if case.name == fault.case)
    bench = Bench(Subject(case, option(fault.option), STEPS, ranks.device), ranks)
    try:
        reference = Reference.make(bench)
        if reference is None:
            raise RuntimeError(f"eager DDP itself failed: {bench.failures}")
        backend = rounding if fault.backend == "rounding" else fault.backend
        # what is derived from eager is derived before anything is broken
        _ = (reference.arithmetic if fault.backend == "rounding" else None, reference.graphs)
        with fault.inject(ranks.rank):
            return judge(reference, mode(fault.mode), backend, tamper=fault.tamper)
    finally:
        bench.close()


def _found(fault: Fault, trial: Trial) -> Found:
    if trial.status is not Status.WRONG:
        # refused is found: ddpopt would not run with it
        refused = trial.status is Status.NOT_POSSIBLE and trial.reason.startswith("refused")
        return Found(fault.name, fault.layer, ("refused",) if refused else (), trial.reason)
    levels = dict.fromkeys(_by(trial))
    return Found(fault.name, fault.layer, tuple(levels), trial.findings[0].message)


def _by(trial: Trial) -> Iterator[str]:
    for finding in trial.findings:
        names = [by for name, by in FOUND_BY.items() if name in finding.message.partition("\n")[0]]
        yield names[0] if names else finding.level
