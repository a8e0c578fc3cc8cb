"""Judge one model in some modes, on the ranks of this process's group.

First a cheap check: eager once, the mode once, compared bit for bit. Unequal results are judged again by full
verification; an exception needs no second check. Either is then compared with the same backend without any
optimizer; if that differs only in last bits, a third check discounts rounding. Invariant: a failure counts
against a mode only if the backend is right, except for rounding.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpopt.dynamo.backends import backend_of
from ddpopt.fuzz.questions import WHOLE, Answer, Outcome, Setting, Task
from ddpopt.fuzz.signatures import ROUNDING, of_error, of_finding, signature_of
from ddpopt.judge.engines.modes import mode
from ddpopt.judge.rules.bench import Bench, Subject
from ddpopt.judge.rules.failing import in_words
from ddpopt.judge.rules.outcome import EXACT
from ddpopt.judge.rules.reference import Reference
from ddpopt.judge.training.options import option
from ddpopt.judge.trials.judge import judge
from ddpopt.judge.verdict import Finding, Status, Trial
from ddpopt.ranks.group import Ranks
from ddpopt.testing.drawn import Program

NUMBERS = ("L0", "L1", "L2")
UNJUDGED = {
    Status.BROKEN: Outcome.BROKEN,
    Status.REFUSED: Outcome.REFUSED,
    Status.NOT_POSSIBLE: Outcome.EAGER,
}


class _Glance(Reference):
    """Eager's run only: its rounding and the graphs of the model alone are not known."""

    graphs = None


def examine(ranks: Ranks, task: Task, tell: Callable[[str], None]) -> list[Answer]:
    """Judge a model in each of its modes. A collective of all ranks.

    Args:
        ranks: the ranks that run it.
        task: the model, its modes, and how it is run.
        tell: called with each mode as it begins, and with ``""`` while eager runs.

    Returns:
        An answer for each mode.
    """
    tell("")
    try:
        case = Program(task.source).case()
    except Exception as error:
        return [_failed(name, Outcome.EAGER, in_words(error)) for name in task.modes]
    # Evaluation is compiled uncut; in the same time a campaign can train another model.
    subject = Subject(case, option(task.training), task.setting.steps, ranks.device, evaluates=False)
    with _limit_of(task), contextlib.closing(Bench(subject, ranks)) as bench:
        try:
            examination = _Examination(bench, task.setting)
            if examination.first is None:
                return [_failed(name, Outcome.EAGER, bench.failures[0].text) for name in task.modes]
            answers = []
            for name in task.modes:
                tell(name)
                answers.append(_answer(examination, name))
            return answers
        finally:
            forget_failures()


def forget_failures() -> None:
    """Reset state that torch keeps after its optimizer fails, which would make later models fail too."""
    functorch: Any = torch._C._functorch  # private; so are the names below
    autograd: Any = torch._C._autograd
    DistributedDataParallel._active_ddp_module = None
    functorch.pop_dynamic_layer_stack_and_undo_to_depth(0)
    autograd._saved_tensors_hooks_enable()


def _answer(examination: "_Examination", name: str) -> Answer:
    """Answer for one mode; verification reports failing runs, so an exception here is its own fault."""
    try:
        return examination.answer(name)
    except Exception as error:
        if examination.bench.ranks.size > 1:
            raise  # otherwise the peers would wait
        return _failed(name, Outcome.BROKEN, in_words(error))


def _failed(name: str, kind: Outcome, reason: str) -> Answer:
    """The answer for a mode that gave no numbers to judge."""
    return Answer(name, kind, of_error(reason), reason)


@contextlib.contextmanager
def _limit_of(task: Task) -> Iterator[None]:
    """Set torch's smallest bucket to the model's cap, if that is lower."""
    c10d: Any = dist  # private: DDP and torch's optimizer read it when constructed
    before = c10d._DEFAULT_FIRST_BUCKET_BYTES
    if task.setting.lowers_limit:
        c10d._DEFAULT_FIRST_BUCKET_BYTES = min(before, task.cap_bytes)
    try:
        yield
    finally:
        c10d._DEFAULT_FIRST_BUCKET_BYTES = before


class _Examination:
    """One model, with the results so far."""

    def __init__(self, bench: Bench, setting: Setting) -> None:
        self.bench = bench
        self.backend = backend_of(setting.backend)
        self._trials: dict[tuple[Reference | None, str, bool | None], Trial] = {}

    @cached_property
    def first(self) -> Reference | None:
        """The reference of the first check; None if eager fails."""
        if self.backend not in EXACT:
            return self.full
        eager = self.bench.run_eager()
        return None if eager is None else _Glance(self.bench, eager, eager)

    @cached_property
    def full(self) -> Reference | None:
        """The full reference; None if eager fails, possibly only when run again."""
        return Reference.make(self.bench)

    def answer(self, name: str) -> Answer:
        """Judge one mode."""
        reference = self.first
        trial = self._judged(reference, name)
        if trial.status is Status.WRONG and not _fails(trial.findings):
            reference = self.full
            trial = self._judged(reference, name)
        if trial.status is Status.OK:
            return Answer(name, Outcome.OK)
        if trial.status is not Status.WRONG:
            return _failed(name, UNJUDGED[trial.status], trial.reason)
        return self._blamed(name, trial, reference)

    def _judged(self, reference: Reference | None, name: str, exact: bool | None = None) -> Trial:
        """Run a mode and compare it with eager, once."""
        if reference is None:
            return Trial("", name, "", "", Status.NOT_POSSIBLE, "eager DDP fails when it is run again")
        known = (reference, name, exact)
        if known not in self._trials:
            forget_failures()
            self._trials[known] = judge(reference, mode(name), self.backend, exact=exact)
        return self._trials[known]

    def _blamed(self, name: str, trial: Trial, reference: Reference | None) -> Answer:
        """Attribute a failure to the mode or the backend."""
        if name == WHOLE:
            return self._of_backend(name, trial.findings)
        whole = self._judged(reference, WHOLE)
        if whole.status is Status.BROKEN:  # its ranks only waited
            return _failed(name, Outcome.BROKEN, whole.reason)
        own = own_findings(trial.findings, whole.findings)
        rounds = not own and not _fails(whole.findings)
        if rounds and not _numbers(self._beyond_rounding(WHOLE, whole.findings)):
            own = _numbers(self._beyond_rounding(name, trial.findings))
        if own:
            return Answer(
                name, Outcome.WRONG, signature_of(self._beyond_rounding(name, own) or own), _told(own)
            )
        return self._of_backend(name, whole.findings)

    def _of_backend(self, name: str, found: Sequence[Finding]) -> Answer:
        beyond = self._beyond_rounding(WHOLE, found)
        signature = signature_of(beyond) if beyond else ROUNDING
        return Answer(name, Outcome.BACKEND, signature, _told(beyond or found))

    def _beyond_rounding(self, name: str, found: Sequence[Finding]) -> Sequence[Finding]:
        """Leave out findings that a mode's rounding explains, if its operations are eager's and it runs.

        This is the third check; it runs the mode once more.
        """
        if self.backend not in EXACT or _fails(found) or not _numbers(found):
            return found
        return beyond_rounding(found, self._judged(self.full, name, exact=False))


def own_findings(found: Sequence[Finding], whole: Sequence[Finding]) -> list[Finding]:
    """Return the findings on a mode that the backend alone does not have.

    Args:
        found: the mode's findings.
        whole: the findings of the same backend without any optimizer.

    Returns:
        Different errors, claims that hold there, and unequal numbers if all are equal there; nothing if the
        backend alone does not run.
    """
    theirs = {of_finding(finding) for finding in whole}
    fails = _fails(whole)
    differs = fails or bool(_numbers(whole))
    return [
        finding
        for finding in found
        if of_finding(finding) not in theirs
        and not (differs and finding.level in NUMBERS)
        and not (fails and finding.level == "L3")
    ]


def beyond_rounding(found: Sequence[Finding], roughly: Trial) -> list[Finding]:
    """Return a mode's findings that rounding does not explain.

    Args:
        found: its findings.
        roughly: the same mode, with rounding allowed as for compiled code, in all steps.

    Returns:
        Findings on structure, numbers that are wrong in both, and numbers that only the second judges; all
        findings if the second run did not behave like the first.
    """
    numbers = _numbers(roughly.findings)
    ran = roughly.status in (Status.OK, Status.WRONG)
    if not ran or _fails(roughly.findings):
        return list(found)
    wrong = {finding.parameter for finding in numbers}
    kept = [f for f in found if f.level not in NUMBERS or f.parameter in wrong]
    seen = {finding.parameter for finding in found}
    return [*kept, *(finding for finding in numbers if finding.parameter not in seen)]


def _numbers(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level in NUMBERS]


def _fails(findings: Sequence[Finding]) -> bool:
    """Whether the step itself fails."""
    return any(finding.level == "run" for finding in findings)


def _told(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{finding.level} {finding.message}" for finding in findings[:8])
