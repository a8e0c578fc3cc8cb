"""The outcome of one test on several ranks, as text that travels between processes and as one report.

Invariant: a test fails if it failed on any rank, and its report then shows the traceback of each such rank.
"""

import json
from collections.abc import Sequence

import pytest
from _pytest.reports import TestReport

__all__ = ["from_text", "lost_rank", "merge", "to_text"]


def to_text(config: pytest.Config, reports: Sequence[TestReport]) -> str:
    return json.dumps(
        [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]
    )


def from_text(config: pytest.Config, text: str) -> list[TestReport]:
    return [_from_data(config, data) for data in json.loads(text)]


def _from_data(config: pytest.Config, data: dict[str, object]) -> TestReport:
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])  # where a test was skipped, and why; JSON has no tuples
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    assert isinstance(report, TestReport)
    return report


def lost_rank(item: pytest.Item, why: str) -> list[TestReport]:
    """Report for a rank that gave none."""
    return [TestReport(item.nodeid, item.location, {}, "failed", why, "call")]


def merge(reports_of: Sequence[Sequence[TestReport]]) -> list[TestReport]:
    """Rank 0's reports, but failed where any rank failed. After a failed setup there is no call."""
    merged = {str(report.when): report for report in reports_of[0]}
    for phase in ("setup", "call", "teardown"):
        failed = [
            (rank, report)
            for rank, reports in enumerate(reports_of)
            for report in reports
            if report.when == phase and report.failed
        ]
        if failed:
            # Who failed first is most often the cause: its peers then fail for want of it.
            failed.sort(key=lambda rank_and_report: rank_and_report[1].stop)
            report = merged[phase] = failed[0][1]
            texts = [f"[rank {rank}] {phase} failed:\n{report.longreprtext}" for rank, report in failed]
            report.longrepr = "\n\n".join(texts)
    if "setup" in merged and merged["setup"].failed:
        merged.pop("call", None)
    return list(merged.values())
