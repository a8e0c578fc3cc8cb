"""A verdict as one HTML page that needs nothing beside itself: styles and script stand in it.

The page is the template `verdict.html.jinja`; here is what it shows that the verdict does not say outright:
which bucket is wrong, and how much of its bound an error takes. Invariant: every name and every message is
escaped, and the page may load nothing, so that a verdict of a stranger's model can be opened too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpopt.explanation.tables import mib
from ddpopt.judge.report.matrix import overview
from ddpopt.judge.report.wording import (
    WORDS,
    count_of,
    level_name,
    number,
    script_outcome,
    sentence,
    share,
    summary,
    tally,
    worst_first,
)
from ddpopt.judge.verdict import Measured, SeenBucket, Status, Trial, Verdict

DETAILED = 24
"""Trials shown with their buckets and errors; the wrong ones first."""

ERRORS = 100
"""Errors shown of one trial; the worst first."""

DECADES = (-6, 3)
"""Powers of ten of the bound that the bar of an error spans."""


@dataclass(frozen=True)
class Bar:
    """A bucket as a bar.

    Attributes:
        bucket: which one.
        percent: its size in hundredths of the largest bucket.
        state: ``"wrong"``, ``"ok"``, or ``"unjudged"`` where nothing was measured of it.
        wrong: those of its parameters that a finding names.
    """

    bucket: SeenBucket
    percent: float
    state: str
    wrong: frozenset[str]


@dataclass(frozen=True)
class ErrorBar:
    """An error as a bar on a logarithmic scale.

    Attributes:
        measured: of which parameter at which level.
        share: of the bound.
        percent: length in hundredths of the scale.
    """

    measured: Measured
    share: float
    percent: float


@dataclass(frozen=True)
class Detail:
    """What the page shows of one trial.

    Attributes:
        index: place among the verdict's trials.
        trial: which one.
        bars: its buckets in the order of reduction.
        errors: the worst first.
    """

    index: int
    trial: Trial
    bars: tuple[Bar, ...]
    errors: tuple[ErrorBar, ...]


def html_page(verdict: Verdict) -> str:
    """Write a verdict as a page.

    Args:
        verdict: what to show.

    Returns:
        A whole HTML document in UTF-8, without any reference to another file.
    """
    return (
        _environment()
        .get_template("verdict.html.jinja")
        .render(
            verdict=verdict,
            view=overview(verdict),
            indices={id(trial): index for index, trial in enumerate(verdict.trials)},
            details=_details(verdict.trials),
            detailed=DETAILED,
            bound_percent=_on_scale(1.0),
            word=WORDS[verdict.exit_code],
            statuses=[each for each in Status if any(trial.status is each for trial in verdict.trials)],
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("ddpopt", "judge/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (count_of, id, level_name, mib, number, script_outcome, sentence, summary, tally)
    environment.filters.update({each.__name__: each for each in shown})
    return environment


def _details(trials: Sequence[Trial]) -> list[Detail]:
    """All trials of a small verdict; of a large one those that are wrong, as far as they fit."""
    chosen = list(enumerate(trials))
    if len(chosen) > DETAILED:
        chosen = [(index, trial) for index, trial in chosen if trial.status is Status.WRONG][:DETAILED]
    chosen.sort(key=lambda each: each[1].status is not Status.WRONG)
    return [
        Detail(index, trial, _bars(trial), _errors(trial.measured))
        for index, trial in chosen
        if trial.buckets or trial.measured or trial.notes or len(trials) == 1
    ]


def _bars(trial: Trial) -> tuple[Bar, ...]:
    largest = max((bucket.nbytes for bucket in trial.buckets), default=0) or 1
    named = {finding.parameter for finding in trial.findings}
    numbered = {finding.bucket for finding in trial.findings}
    judged = {entry.parameter for entry in trial.measured}
    bars = []
    for bucket in trial.buckets:
        wrong = frozenset(name for name in bucket.params if name in named)
        state = "ok" if judged.intersection(bucket.params) else "unjudged"
        if wrong or bucket.index in numbered:
            state = "wrong"
        bars.append(Bar(bucket, 100 * bucket.nbytes / largest, state, wrong))
    return tuple(bars)


def _errors(measured: Sequence[Measured]) -> tuple[ErrorBar, ...]:
    return tuple(
        ErrorBar(each, share(each), _on_scale(share(each))) for each in worst_first(measured)[:ERRORS]
    )


def _on_scale(value: float) -> float:
    """Where a share of the bound stands on the scale, in hundredths of it."""
    if value == 0:
        return 0.0
    low, high = DECADES
    decade = math.log10(value) if math.isfinite(value) else high
    # a hundredth at least: an error that is there is seen
    return min(100.0, max(1.0, 100 * (decade - low) / (high - low)))
