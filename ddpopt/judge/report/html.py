"""A verdict as one HTML page that needs no other file: it holds its style and its script.

The page is the template `verdict.html.jinja`; here is what it shows that the verdict does not say outright:
which bucket is wrong, and which trials come in full. Invariant: every name and every message is
escaped, and the page may load nothing, so that a verdict of a stranger's model can be opened too.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    worst_first,
)
from ddpopt.judge.verdict import SeenBucket, Status, Trial, Verdict

DETAILED = 24
"""Trials shown with their buckets and errors; the wrong ones first."""

ERRORS = 100
"""Errors shown of one trial; the worst first."""


def html_page(verdict: Verdict) -> str:
    """Write a verdict as a page.

    Args:
        verdict: what to show.

    Returns:
        A whole HTML document in UTF-8, without any reference to another file.
    """
    environment = Environment(
        loader=PackageLoader("ddpopt", "judge/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = (count_of, id, level_name, mib, number, script_outcome, sentence, share, summary, worst_first)
    own = (state, wrong_params)
    environment.filters.update({each.__name__: each for each in (*shown, *own)})
    return environment.get_template("verdict.html.jinja").render(
        verdict=verdict,
        view=overview(verdict),
        indices={id(trial): index for index, trial in enumerate(verdict.trials)},
        details=_detailed(verdict.trials),
        detailed=DETAILED,
        most_errors=ERRORS,
        word=WORDS[verdict.exit_code],
        statuses=[each for each in Status if any(trial.status is each for trial in verdict.trials)],
    )


def _detailed(trials: Sequence[Trial]) -> list[Trial]:
    """All trials of a small verdict, the wrong ones first; of a large one those that are wrong."""
    chosen = sorted(trials, key=lambda trial: trial.status is not Status.WRONG)
    if len(chosen) > DETAILED:
        chosen = [trial for trial in chosen if trial.status is Status.WRONG][:DETAILED]
    return [each for each in chosen if each.buckets or each.measured or each.notes or len(trials) == 1]


def wrong_params(bucket: SeenBucket, trial: Trial) -> list[str]:
    """Those of a bucket's parameters that a finding names."""
    named = {finding.parameter for finding in trial.findings}
    return [name for name in bucket.params if name in named]


def state(bucket: SeenBucket, trial: Trial) -> str:
    """``"wrong"``, ``"ok"``, or ``"unjudged"`` where nothing was measured of a bucket."""
    if wrong_params(bucket, trial) or bucket.index in {finding.bucket for finding in trial.findings}:
        return "wrong"
    return "ok" if {entry.parameter for entry in trial.measured}.intersection(bucket.params) else "unjudged"
