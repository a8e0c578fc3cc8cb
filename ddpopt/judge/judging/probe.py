"""One more step that nothing reduces: what each rank computes alone, and the mode's reduction of just that.

Invariant: the gradients that the mode reduced are compared with the mean of the mode's own, so that nothing
that compiled code computes otherwise can hide what communication does.
"""

from __future__ import annotations

import torch

from ddpopt.judge.compare import bitwise, dense
from ddpopt.judge.judging.numbers import Kind, Number
from ddpopt.judge.judging.record import Record
from ddpopt.judge.judging.reference import Reference, reduced
from ddpopt.judge.judging.rules import Rules
from ddpopt.judge.judging.sheet import Sheet
from ddpopt.judge.verdict import Finding


def probe(reference: Reference, record: Record, rules: Rules, sheet: Sheet) -> None:
    """Judge the last step by one more, from the same state, that nothing reduced. A collective.

    Args:
        reference: eager's runs.
        record: the run, which has such a step.
        rules: of the trial; what eager does not reproduce says nothing when computed once more.
        sheet: where to note what is found.
    """
    _reduction(reference, record, rules, sheet)
    alike = same_starts(record, reference.eager)
    if reference.alone is not None and rules.exact and alike[-1:] == [True]:
        _alone(reference, record, rules, sheet)


def _reduction(reference: Reference, record: Record, rules: Rules, sheet: Sheet) -> None:
    """L1: the mean over ranks of what the mode computes on each."""
    step, rank, buckets = len(record.steps) - 1, reference.bench.ranks.rank, buckets_of(record)
    sums = reference.bench.sums(record.local or {}, record.steps[step].state)
    sent_as = reference.bench.subject.option.comm_dtype
    for name, got in record.steps[step].gradients.items():
        if got is None or name not in sums or name in rules.unstable | rules.ignored:
            continue
        if dense(got).shape == sums[name].total.shape:  # else the structure says so
            number = Number(step, name, Kind.GRADIENT, got, got)
            eager = reference.eager.steps[step].gradients.get(name)
            sheet.add("L1", number, reduced(got, sums[name], sent_as, eager), rank, buckets.get(name))


def _alone(reference: Reference, record: Record, rules: Rules, sheet: Sheet) -> None:
    """L0: what the model alone computes in eager."""
    step, rank, buckets = len(record.steps) - 1, reference.bench.ranks.rank, buckets_of(record)
    expected = {} if reference.alone is None else reference.alone.steps[step].gradients
    for name, got in (record.local or {}).items():
        wanted = expected.get(name)
        if got is None or wanted is None:
            if got is not wanted:
                message = f"under no_sync the gradient of {name} is there on one side only"
                sheet.findings.append(Finding("L3", "no_sync as in eager", message, rank, step, name))
        elif name not in rules.unstable | rules.excused and dense(got).shape == dense(wanted).shape:
            number = Number(step, name, Kind.GRADIENT, got, wanted)
            sheet.add("L0", number, bitwise(got, wanted), rank, buckets.get(name))


def same_starts(record: Record, eager: Record) -> list[bool]:
    """Tell for each step that both took whether it started from the parameters that eager's started from."""
    steps = min(len(record.steps), len(eager.steps))
    if record.follow is not None:
        return [True] * steps
    return [
        all(torch.equal(left[name], right[name]) for name in step.gradients)
        for left, right, step in zip(record.starts[:steps], eager.starts, eager.steps, strict=False)
    ]


def buckets_of(record: Record) -> dict[str, int]:
    """The bucket that carried each parameter in the last synchronised backward."""
    last = record.iterations[-1].buckets if record.iterations else ()
    return {name: bucket.index for bucket in last for name in bucket.params}
