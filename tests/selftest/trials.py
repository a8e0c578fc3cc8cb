"""One fault, injected and judged: whether it was injected at all, and which level found it.

Invariant: a fault counts as found only if its broken code ran on every rank that is to carry it, and somebody
reported it whose business it is.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddpopt.cases import corpus
from ddpopt.cases.matrix import CASES
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import COLLECTIVE_LIMIT_S, Bench, Subject
from ddpopt.judge.rules.failing import Failure
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.trials.on_rank import STEPS
from ddpopt.judge.trials.resuming import resume
from ddpopt.judge.verdict import Status, Trial
from ddpopt.ranks.group import Ranks
from tests.selftest.clean_runs import rounding
from tests.selftest.faults import Fault
from tests.selftest.metadata import reusing
from tests.selftest.shown import shown_case
from tests.selftest.sites import Site

REFUSALS = {
    "CertificateError": "certificate",
    "PlanMismatchError": "agreement",
    "UsageError": "another refusal",
    "UnsupportedError": "another refusal",
}
"""Errors that ddpopt itself raises before anything is compared, and the level to which each belongs."""
Note = Callable[[], None]
BACKENDS: dict[str, Any] = {"aot_eager": "aot_eager", "rounding": rounding, "reusing": reusing}


@dataclass(frozen=True)
class Found:
    """The outcome of one fault.

    Attributes:
        injected: whether its broken code ran on every rank that is to carry it.
        by: who found it, of those whose business it is; empty if nobody did.
        due: who was there and had to find it.
        message: the first thing said of it.
    """

    injected: bool
    by: tuple[str, ...]
    due: tuple[str, ...]
    message: str

    @property
    def complaint(self) -> str:
        """What is wrong with the verification, or with the fault; empty if nothing is."""
        if not self.injected:
            return f"not injected: {self.message}"
        if not self.by:
            return f"not found: {self.message or 'nothing was said of it'}"
        overlooked = ", ".join(level for level in self.due if level not in self.by)
        return f"overlooked by {overlooked}" if overlooked else ""


def try_fault(ranks: Ranks, fault: Fault, note: Note = lambda: None) -> tuple[Trial, Found]:
    """Judge a mode with a fault in it; a collective of all ranks.

    Args:
        ranks: the ranks.
        fault: the fault.
        note: told when the broken code has run on this rank.

    Returns:
        The trial, and what became of the fault; the same on all ranks.
    """
    with unbroken(ranks, fault.case, fault.option) as reference:
        return judge_fault(reference, fault, note)


@contextlib.contextmanager
def unbroken(ranks: Ranks, case_name: str, option_name: str) -> Iterator[Reference]:
    """Run eager DDP, which all faults of one case under one option may share; a collective of all ranks.

    Args:
        ranks: the ranks.
        case_name: of the matrix or of the corpus.
        option_name: the option.

    Yields:
        What the faults are held against.
    """
    own = (*CASES, shown_case())
    case = next((case for case in own if case.name == case_name), None)
    case = case or corpus.case(case_name)
    # evaluation compiles a model twice more, and one case alone has faults that show in it
    subject = Subject(case, option(option_name), STEPS, ranks.device, evaluates=case_name == "shown")
    bench = Bench(subject, ranks, COLLECTIVE_LIMIT_S, resume)
    try:
        reference = Reference.make(bench)
        if reference is None:
            raise RuntimeError(f"eager DDP itself failed: {bench.failures}")
        yield reference
    finally:
        bench.close()


def judge_fault(reference: Reference, fault: Fault, note: Note = lambda: None) -> tuple[Trial, Found]:
    """Judge a mode with a fault in it, compared with an existing reference.

    Args:
        reference: of the fault's case and option.
        fault: the fault.
        note: told when the broken code has run on this rank.

    Returns:
        As `try_fault`.
    """
    bench, ranks = reference.bench, reference.bench.ranks
    site = Site(ranks.rank, ranks.size, note)
    exact = True if fault.backend == "reusing" else None
    # what is derived from eager is derived before anything is broken
    _ = (reference.graphs, reference.arithmetic if fault.backend == "rounding" else None)
    tamper = partial(_tampered, fault, site)
    with fault.inject(site):
        trial = judge(reference, mode(fault.mode), BACKENDS[fault.backend], tamper=tamper, exact=exact)
    return trial, found_out(fault, trial, bench.failures, ranks.gather(site.marked))


def _tampered(fault: Fault, site: Site, trainer: Any) -> None:
    fault.tamper(trainer, site)


def found_out(fault: Fault, trial: Trial, failures: Sequence[Failure], marked: Sequence[bool]) -> Found:
    """Report the outcome of a fault.

    Args:
        fault: the fault.
        trial: what verification said.
        failures: how the run failed, if it did.
        marked: whether the broken code has run, by rank.

    Returns:
        Found by whoever said something that is theirs to say; by nobody if it was not injected.
    """
    said = [finding.message for finding in trial.findings] or [trial.reason]
    reporters = [_reporter(failure) for failure in failures] or [found.level for found in trial.findings]
    if trial.status is Status.BROKEN:
        reporters = ["ranks"]
    elif trial.status is not Status.WRONG:
        reporters = []
    return _sum_up(fault, marked, reporters, trial.levels, said[0])


def died(fault: Fault, marked: Sequence[bool], words: str) -> Found:
    """Report the outcome of a fault that crashed the ranks.

    Args:
        fault: the fault.
        marked: whether the broken code has run, by rank.
        words: what was said of the ranks.
    """
    return _sum_up(fault, marked, ["ranks"], (), words)


def _reporter(failure: Failure) -> str:
    """Who reports an exception: ddpopt's own errors belong to a level, all others to the step."""
    kinds = re.findall(r"(?:^|raised: )(\w+):", failure.text)  # Dynamo's wrapper names what was raised
    return next((REFUSALS[kind] for kind in reversed(kinds) if kind in REFUSALS), "run")


def _sum_up(
    fault: Fault, marked: Sequence[bool], reporters: Sequence[str], levels: Sequence[str], words: str
) -> Found:
    injected = bool(marked) and all(marked[rank] for rank in fault.carriers(len(marked)))
    by = tuple(dict.fromkeys(name for name in reporters if injected and name in fault.seen_by))
    due = fault.due(levels, len(marked))
    return Found(injected, by, due, words)
