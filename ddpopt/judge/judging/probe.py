"""One more step that nothing reduces: what each rank computes alone, and the mode's reduction of just that.

Invariant: the gradients that the mode reduced are compared with the mean of the mode's own, so that nothing
that compiled code computes otherwise can hide what communication does.
"""

from __future__ import annotations

from ddpopt.judge.compare import bitwise, communication, dense
from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Reference
from ddpopt.judge.judging.rules import Rules
from ddpopt.judge.judging.sheet import Sheet
from ddpopt.judge.parallel import Gradients
from ddpopt.judge.verdict import Finding


def probe(reference: Reference, record: Record, rules: Rules, sheet: Sheet) -> None:
    """Judge the last step by one more, from the same state, that nothing reduced. A collective.

    Args:
        reference: eager's runs.
        record: the run, which has such a step.
        rules: of the trial; what eager does not reproduce says nothing when computed once more.
        sheet: where to note what is found.
    """
    step, local = len(record.steps) - 1, record.local or {}
    sums = reference.bench.sums(local, record.steps[step].state)
    eager, sent_as = reference.eager.steps[step].gradients, reference.bench.subject.option.comm_dtype
    for name, got in record.steps[step].gradients.items():
        if got is None or name not in sums or name in rules.unstable | rules.ignored:
            continue
        if dense(got).shape == sums[name].total.shape:  # else the structure says so
            sheet.add("L1", step, name, communication(got, sums[name], sent_as, eager.get(name)))
    if reference.alone is not None and rules.exact:
        _alone(reference.alone.steps[step].gradients, local, step, rules, sheet)


def _alone(expected: Gradients, local: Gradients, step: int, rules: Rules, sheet: Sheet) -> None:
    """L0: what the model alone computes in eager."""
    for name, got in local.items():
        wanted = expected.get(name)
        if got is None or wanted is None:
            if got is not wanted:
                message = f"under no_sync the gradient of {name} is there on one side only"
                sheet.findings.append(Finding("L3", "no_sync as in eager", message, sheet.rank, step, name))
        elif name not in rules.unstable | rules.excused and dense(got).shape == dense(wanted).shape:
            sheet.add("L0", step, name, bitwise(got, wanted))
