"""What the gate says, as text for a terminal or a log.

Invariant: every change is told in full, with what it was and what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddpopt.explanation.tables import paragraph
from ddpopt.judge.report.wording import count_of

if TYPE_CHECKING:
    from ddpopt.gate.comparison import Comparison
    from ddpopt.gate.moved import Change

ADVICE = (
    "If that is meant, put it into the baseline, where a reviewer sees it: "
    "ddpopt gate --baseline {baseline} --update"
)


def gate_text(comparison: Comparison) -> str:
    """Write what the gate found.

    Args:
        comparison: a run held against a baseline.

    Returns:
        Lines of at most 80 columns, but for long names.
    """
    return "\n".join(_lines(comparison))


def headline(comparison: Comparison) -> str:
    """The outcome in one line.

    Args:
        comparison: a run held against a baseline.

    Returns:
        For instance ``"MOVED: 2 changes; 3 cases against ci/baseline.json (torch 2.13)"``.
    """
    found = []
    if comparison.grave or not comparison:
        found.append(count_of(len(comparison.grave), "change"))
    if comparison.remarks:
        found.append(count_of(len(comparison.remarks), "remark"))
    word = "UNCHANGED" if comparison else "MOVED"
    return f"{word}: {', '.join(found) or 'nothing moved'}; {compared(comparison)}"


def compared(comparison: Comparison) -> str:
    """What was compared with what, in a few words."""
    figures = comparison.figures
    parts = [count_of(len(figures.cases), "case")]
    if figures.ratios:
        parts.append(f"{len(figures.ratios)} of them timed")
    if figures.tests:
        parts.append(f"{sum(figures.tests.values())} tests collected")
    return f"{', '.join(parts)} against {comparison.baseline} ({comparison.release})"


def sentence(change: Change) -> str:
    """A change in one line, without its subject.

    Args:
        change: what moved.

    Returns:
        For instance ``"graphs: 1 before, 2 now"``.
    """
    return f"{change.what}: {change.before} before, {change.now} now"


def by_place(changes: Sequence[Change]) -> dict[str, list[Change]]:
    """Changes by where they are, in their order."""
    places: dict[str, list[Change]] = {}
    for change in changes:
        places.setdefault(change.place, []).append(change)
    return places


def _lines(comparison: Comparison) -> Iterator[str]:
    yield paragraph(headline(comparison), "  ")
    yield from _told(comparison.grave, "")
    yield from _told(comparison.remarks, "remark: ")
    if comparison.left_out:
        yield paragraph(f"Not compared, for --only left it out: {', '.join(comparison.left_out)}", "  ")
    if comparison.grave and not comparison.updates:
        yield ""
        yield paragraph(ADVICE.format(baseline=comparison.baseline), "  ")


def _told(changes: Sequence[Change], prefix: str) -> Iterator[str]:
    for place, found in by_place(changes).items():
        yield ""
        yield place
        for change in found:
            first, *others = sentence(change).splitlines()
            yield paragraph(f"  {prefix}{first}", "    ")
            yield from (f"    {line}" for line in others)
