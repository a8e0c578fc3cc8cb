"""A verdict for GitHub Actions: annotations on the run, and a page of Markdown as the step's summary.

Annotations are lines that the runner reads (GitHub's documentation, "Workflow commands"), on stdout and on
stderr alike. It shows ten errors of a step, so where there are more findings they are told reason by reason.
Invariant: no text of a model or of an error can end its line, or begin another command.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TextIO

from ddpopt.errors import UsageError
from ddpopt.judge.report.markdown import step_summary
from ddpopt.judge.report.matrix import Reason, overview
from ddpopt.judge.report.wording import count_of, headline, level_name, sentence
from ddpopt.judge.verdict import Status, Verdict

__all__ = ["annotations", "error_command", "publish", "step_summary", "write_github"]

SHOWN_BY_GITHUB = 10
"""Error annotations of one step."""

VARIABLE = "GITHUB_STEP_SUMMARY"


def annotations(verdict: Verdict) -> list[str]:
    """Return one workflow command for each finding, or for each reason where there are many.

    Args:
        verdict: what to report.

    Returns:
        At most ten lines, none where the verdict is true.
    """
    if verdict:
        return []
    view = overview(verdict)
    grave = [reason for reason in view.reasons if reason.status is not Status.NOT_POSSIBLE]
    if not grave:
        return [error_command("ddpopt verify", headline(verdict))]
    if sum(max(1, len(reason.findings)) for reason in grave) <= SHOWN_BY_GITHUB:
        return [line for reason in grave for line in _each(reason)]
    lines = [_together(reason) for reason in grave]
    if len(lines) <= SHOWN_BY_GITHUB:
        return lines
    shown = SHOWN_BY_GITHUB - 1
    left = count_of(len(lines) - shown, "reason")
    return [*lines[:shown], error_command("ddpopt verify", f"and {left} more, in the summary of this step")]


def _each(reason: Reason) -> Iterator[str]:
    for trial, finding in reason.findings:
        title = f"ddpopt verify: {level_name(finding.level)}"
        yield error_command(title, f"{trial.name}: {finding.claim}: {sentence(finding)}")
    for trial in reason.trials:
        if not trial.findings:
            yield error_command(f"ddpopt verify: {trial.status}", f"{trial.name}: {trial.reason}")


def _together(reason: Reason) -> str:
    levels = dict.fromkeys(level_name(level) for level, _ in reason.claims)
    first = reason.trials[0]
    text = sentence(first.findings[0]) if first.findings else first.reason
    others = len(reason.trials) - 1
    more = f"\n(and {count_of(others, 'trial')} more like it)" if others else ""
    return error_command(
        f"ddpopt verify: {', '.join(levels) or reason.status}", f"{first.name}: {text}{more}"
    )


def error_command(title: str, message: str) -> str:
    """Write a workflow command that annotates the run with an error.

    Args:
        title: one line.
        message: any number of them.

    Returns:
        One line.
    """
    return f"::error title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def write_github(verdict: Verdict, stream: TextIO | None = None) -> None:
    """Print the annotations, and append the summary to the file that GitHub names.

    Where ``GITHUB_STEP_SUMMARY`` is unset, the summary is left out and stderr says so.

    Args:
        verdict: what to report.
        stream: where annotations go: stdout, unless a report stands there that is no text for people.

    Raises:
        UsageError: the file cannot be written.
    """
    publish(annotations(verdict), step_summary(verdict), stream)


def publish(commands: Iterable[str], summary: str, stream: TextIO | None = None) -> None:
    """Print workflow commands, and append a summary to the file that GitHub names.

    Args:
        commands: one line each.
        summary: Markdown.
        stream: where commands go; stdout by default.

    Raises:
        UsageError: the file cannot be written.
    """
    told = stream or sys.stdout
    for line in commands:
        told.write(f"{line}\n")
    told.flush()
    file = os.environ.get(VARIABLE)
    if not file:
        sys.stderr.write(f"ddpopt: no step summary: {VARIABLE} is unset; GitHub sets it in each step\n")
        return
    try:
        with open(file, "a", encoding="utf-8") as page:
            page.write(summary)
    except OSError as error:
        raise UsageError(
            f"cannot append the step summary to {file!r}, which {VARIABLE} names: {error.strerror}; "
            "name a file that can be written, or unset it"
        ) from error
