"""Convert the reports of several ranks to text for other processes, and merge them into one report.

Invariant: a test fails if it failed on any rank, and its report then shows the traceback of each such rank.
"""

import json
from collections.abc import Sequence

import pytest
from _pytest.reports import TestReport

ADVICE = "Collect the same tests on every rank: collection must not depend on the rank, the time or chance."


def to_text(config: pytest.Config, reports: Sequence[TestReport]) -> str:
    """Write reports as JSON.

    Args:
        config: pytest's own.
        reports: the reports of one test, in one process.

    Returns:
        Text that `from_text` reads.
    """
    return json.dumps(
        [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]
    )


def from_text(config: pytest.Config, text: str) -> list[TestReport]:
    """Read what `to_text` wrote.

    Args:
        config: pytest's own.
        text: JSON.

    Returns:
        Equal reports.
    """
    return [_from_data(config, data) for data in json.loads(text)]


def _from_data(config: pytest.Config, data: dict[str, object]) -> TestReport:
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])  # the place and reason of a skip; JSON has no tuples
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    assert isinstance(report, TestReport)
    return report


def lost(item: pytest.Item, why: str) -> list[TestReport]:
    """Make a report for a rank that sent none, or for a test that no rank could run.

    Args:
        item: the test.
        why: the known reason.

    Returns:
        One report, of a failure.
    """
    return [TestReport(item.nodeid, item.location, {}, "failed", why, "call")]


def merge(reports_of: Sequence[Sequence[TestReport]]) -> list[TestReport]:
    """Merge the reports of all ranks: rank 0's, but failed if any rank failed.

    Args:
        reports_of: by rank, the reports of setup, call and teardown, as far as they exist.

    Returns:
        Reports of one test. After a failed setup there is no call.
    """
    merged = {str(report.when): report for report in reports_of[0]}
    for phase in ("setup", "call", "teardown"):
        failed = [
            (rank, report)
            for rank, reports in enumerate(reports_of)
            for report in reports
            if report.when == phase and report.failed
        ]
        if failed:
            # The first rank to fail is usually the cause: its peers then fail because it is missing.
            failed.sort(key=lambda rank_and_report: rank_and_report[1].stop)
            report = merged[phase] = failed[0][1]
            report.longrepr = _told_once(phase, [(rank, report.longreprtext) for rank, report in failed])
    if "setup" in merged and merged["setup"].failed:
        merged.pop("call", None)
    _require_one_outcome(reports_of, merged)
    return list(merged.values())


def _told_once(phase: str, failures: Sequence[tuple[int, str]]) -> str:
    """All failures of a phase; text that ranks share appears once, because shared findings are long."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in failures:
        ranks_of.setdefault(text, []).append(rank)
    names = [", ".join(map(str, sorted(ranks))) for ranks in ranks_of.values()]
    return "\n\n".join(
        f"[rank {name}] {phase} failed:\n{text}" for name, text in zip(names, ranks_of, strict=True)
    )


def _require_one_outcome(reports_of: Sequence[Sequence[TestReport]], merged: dict[str, TestReport]) -> None:
    """Fail a test that some ranks skipped and others ran, because it ran without some of its ranks."""
    if any(report.failed for report in merged.values()):
        return
    skipped = [
        rank
        for rank, reports in enumerate(reports_of)
        if any(report.skipped and not hasattr(report, "wasxfail") for report in reports)
    ]
    if skipped and len(skipped) < len(reports_of):
        last = merged.get("call") or merged["setup"]
        last.outcome = "failed"
        last.longrepr = (
            f"expected all ranks to run a test, or none; rank(s) {', '.join(map(str, skipped))} of "
            f"{len(reports_of)} skipped it. Make the reason for a skip the same on every rank."
        )


def difference(names_of: Sequence[Sequence[str]]) -> str:
    """Describe how the tests that ranks collected differ from those of rank 0.

    Args:
        names_of: by rank, the ids of its tests, in the order in which they run.

    Returns:
        A message for the user; empty if all lists are equal.

    >>> print(difference([["a", "b"], ["b"]]))
    the ranks collected different tests:
      rank 1 lacks 1 of rank 0's 2 tests: a
    Collect the same tests on every rank: collection must not depend on the rank, the time or chance.
    """
    first = names_of[0]
    lines = []
    expected = set(first)
    for rank, names in enumerate(names_of):
        own = set(names)
        lacking = [name for name in first if name not in own]
        besides = [name for name in names if name not in expected]
        if lacking:
            lines.append(f"  rank {rank} lacks {len(lacking)} of rank 0's {len(first)} tests: {lacking[0]}")
        if besides:
            lines.append(f"  rank {rank} has {len(besides)} that rank 0 lacks: {besides[0]}")
        if not lacking and not besides and list(names) != list(first):
            lines.append(f"  rank {rank} has them in another order")
    return "\n".join(["the ranks collected different tests:", *lines, ADVICE]) if lines else ""
