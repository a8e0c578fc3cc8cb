"""What the gate says, for GitHub Actions: annotations on the run, and Markdown as the step's summary.

GitHub shows ten annotations of a step; where more moved, they are told place by place. Invariant: the summary
has every change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from ddpopt.gate.text import ADVICE, by_place, compared, headline, sentence
from ddpopt.judge.report.github import SHOWN_BY_GITHUB, error_command, publish
from ddpopt.judge.report.markdown import SIGNS, markdown_table, plain

if TYPE_CHECKING:
    from ddpopt.gate.comparison import Comparison
    from ddpopt.gate.moved import Change

TITLE = "ddpopt gate"


def gate_annotations(comparison: Comparison) -> list[str]:
    """Write one workflow command for each change, or for each case and mode where there are many.

    Args:
        comparison: a run held against a baseline.

    Returns:
        At most ten lines, none where nothing grave moved.
    """
    if comparison:
        return []
    if not comparison.grave:
        return [error_command(TITLE, headline(comparison))]
    if len(comparison.grave) <= SHOWN_BY_GITHUB:
        return [_annotation(change.place, [change]) for change in comparison.grave]
    lines = [_annotation(place, found) for place, found in by_place(comparison.grave).items()]
    if len(lines) <= SHOWN_BY_GITHUB:
        return lines
    shown = SHOWN_BY_GITHUB - 1
    left = len(lines) - shown
    return [*lines[:shown], error_command(TITLE, f"and {left} more, in the summary of this step")]


def _annotation(place: str, changes: Sequence[Change]) -> str:
    return error_command(f"{TITLE}: {place}", "\n".join(map(sentence, changes)))


def gate_summary(comparison: Comparison) -> str:
    """Write GitHub's Markdown.

    Args:
        comparison: a run held against a baseline.

    Returns:
        Blocks with an empty line after each: GitHub joins the summaries of several commands.
    """
    return "".join(f"{block}\n\n" for block in _blocks(comparison))


def _blocks(comparison: Comparison) -> Iterator[str]:
    outcome = "Nothing moved" if comparison else "Moved"
    yield f"## {SIGNS[comparison.exit_code]} {TITLE}: {outcome}"
    yield f"{plain(compared(comparison))}."
    for title, changes in (("Changes", comparison.grave), ("Remarks", comparison.remarks)):
        if changes:
            rows = [(change.place, change.what, change.before, change.now) for change in changes]
            yield f"### {title}"
            yield markdown_table(["where", "what", "before", "now"], rows, words=4)
    if comparison.left_out:
        yield f"Not compared, for --only left it out: {plain(', '.join(comparison.left_out))}."
    if comparison.grave and not comparison.updates:
        yield plain(ADVICE.format(baseline=comparison.baseline))


def write_gate_github(comparison: Comparison, stream: TextIO | None = None) -> None:
    """Print the annotations, and append the summary to the file that GitHub names.

    Args:
        comparison: a run held against a baseline.
        stream: where annotations go; stdout by default.

    Raises:
        UsageError: the file cannot be written.
    """
    publish(gate_annotations(comparison), gate_summary(comparison), stream)
