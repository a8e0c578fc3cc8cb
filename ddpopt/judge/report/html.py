"""A verdict as one self-contained HTML page, including its style and script.

The page is the template `verdict.html.jinja`. Invariant: every name and every message is escaped, and the
page loads nothing, so that a verdict on an untrusted model can be opened safely.
"""

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpopt.judge.report import wording
from ddpopt.judge.report.curves import curve
from ddpopt.judge.report.matrix import overview
from ddpopt.judge.verdict import SeenBucket, Status, Trial, Verdict
from ddpopt.terminal.tables import mib

DETAILED = 24
"""Trials shown with their buckets and errors; the wrong ones first."""

ERRORS = 100
"""Errors shown for one trial; the worst first."""


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
    words = ("count_of", "level_name", "number", "outcome", "sentence", "worst_first")
    environment.filters |= {name: getattr(wording, name) for name in words}
    environment.filters |= {"id": id, "is_wrong": is_wrong, "mib": mib, "curve": curve}
    view = overview(verdict)
    return environment.get_template("verdict.html.jinja").render(
        verdict=verdict,
        view=view,
        marks=view.marks(),
        indices={id(trial): index for index, trial in enumerate(verdict.trials)},
        details=sorted(verdict.trials, key=lambda trial: trial.status is not Status.WRONG)[:DETAILED],
        most_errors=ERRORS,
        word=wording.WORDS[verdict.exit_code],
        headline=wording.headline(verdict),
        statuses=[each for each in Status if any(trial.status is each for trial in verdict.trials)],
    )


def is_wrong(bucket: SeenBucket, trial: Trial) -> bool:
    """Whether a finding names a bucket, or one of its parameters."""
    return any(found.bucket == bucket.index or found.parameter in bucket.params for found in trial.findings)
