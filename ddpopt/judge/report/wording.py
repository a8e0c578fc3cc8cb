"""The words and the figures that all reports of a verdict share.

Invariant: every word of a report can be reproduced from the verdict's JSON.
"""

import math
from collections import Counter
from collections.abc import Iterable

from ddpopt.judge.verdict import Finding, Location, Measured, Status, Verdict

LEVELS = {
    "L0": "L0 bitwise",
    "L1": "L1 communication bound",
    "L2": "L2 compiled arithmetic",
    "L3": "L3 structure",
    "run": "the step itself",
}
WORDS = {0: "RIGHT", 1: "WRONG", 3: "NOT JUDGED"}


def level_name(level: str) -> str:
    """A level's short name with its meaning.

    >>> level_name("L0"), level_name("run")
    ('L0 bitwise', 'the step itself')
    """
    return LEVELS.get(level, level)


def count_of(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count_of(1, "rank"), count_of(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def number(value: float | None) -> str:
    """A figure with three digits; whole numbers up to a million in full.

    >>> number(None), number(0.0), number(999999.0), number(1.23456e-8), number(1e6), number(float("nan"))
    ('-', '0', '999999', '1.23e-08', '1e+06', 'nan')
    """
    if value is None:
        return "-"
    return str(int(value)) if abs(value) < 1e6 and value == int(value) else f"{value:.3g}"


def headline(verdict: Verdict) -> str:
    """The verdict in one line.

    Args:
        verdict: what to sum up.

    Returns:
        For instance ``"WRONG: pkg:model on 2 ranks: 3 findings; 2 trials: 1 ok, 1 wrong"``.
    """
    counts = Counter(trial.status for trial in verdict.trials)
    ends = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status]) or "none"
    where = f"{verdict.target} on {verdict.ranks}"
    found = count_of(len(verdict.findings), "finding")
    return f"{WORDS[verdict.exit_code]}: {where}: {found}; {count_of(len(verdict.trials), 'trial')}: {ends}"


def sentence(finding: Finding) -> str:
    """A finding's message, plus its rank, step, parameter and bucket if the message omits them.

    >>> sentence(Finding("L0", "bits", "w differs on rank 1", rank=1, step=0, parameter="w"))
    'w differs on rank 1 (step 0)'
    """
    missing = []
    for noun in ("parameter", "bucket", "rank", "step"):
        value = getattr(finding, noun)
        said = value if noun == "parameter" else f"{noun} {value}"
        if value is not None and said not in finding.message:
            missing.append(f"{noun} {value}")
    return f"{finding.message} ({', '.join(missing)})" if missing else finding.message


def outcome(location: Location) -> str:
    """The outcome of running the reproduction script."""
    if location.reproduces is None:
        return "its run in a fresh interpreter did not end in the time that was left"
    shows = "it shows the difference" if location.reproduces else "it did not show the difference"
    return f"run in a fresh interpreter, {shows}"


def worst_first(measured: Iterable[Measured]) -> list[Measured]:
    """Sort by the share of the bound, then by ULPs, then by name; NaN comes first."""

    def badness(one: Measured) -> tuple[float, float, str]:
        return -one.share, -math.inf if math.isnan(one.ulps) else -one.ulps, one.parameter

    return sorted(measured, key=badness)
